"""A small GAN: two networks and two optimizers in one loop, on any number of workers.

The generator learns to place points on a circle; the discriminator, to tell them from real ones.
"""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import hvdtrain


class Circle(torch.utils.data.Dataset):
    """2,000 points on the unit circle, with noise."""

    def __len__(self):
        return 2000

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        angle = torch.rand((), generator=generator) * 2 * torch.pi
        noise = torch.randn(2, generator=generator) * 0.05
        return torch.stack([angle.cos(), angle.sin()]) + noise


def network(inputs, outputs):
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 32), torch.nn.LeakyReLU(0.2), torch.nn.Linear(32, outputs)
    )


torch.manual_seed(0)
generator, discriminator = network(4, 2), network(2, 1)
generate = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.9))
discriminate = torch.optim.Adam(discriminator.parameters(), 2e-3, betas=(0.5, 0.9))

with hvdtrain.Loop(
    {"generator": generator, "discriminator": discriminator},
    [discriminate, generate],
    Circle(),
    metrics=["generator_loss"],
    global_batch_size=100,
    epochs=2,
) as loop:
    for step in loop:
        for real in step.batches(discriminate):
            n = len(real)
            fake = generator(torch.randn(n, 4, device=loop.device))
            scores = discriminator(torch.cat([real, fake])).flatten()
            truth = torch.cat([torch.ones(n), torch.zeros(n)]).to(loop.device)
            loss = bce(scores, truth, reduction="sum")
            step.backward(loss, n)
        step.update()
        for real in step.batches(generate):
            n = len(real)
            scores = discriminator(generator(torch.randn(n, 4, device=loop.device))).flatten()
            loss = bce(scores, torch.ones_like(scores), reduction="sum")
            step.backward(loss, n, {"generator_loss": loss})
        step.update()
