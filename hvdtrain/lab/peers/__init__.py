"""The same training written for each system that `hvdtrain bench peers` compares.

same_work                what all have in common: model, data, settings, the times of steps
plain_horovod            Horovod, as its examples have it
torch_ddp                torchrun and DistributedDataParallel
accelerate_loop          Accelerate
fabric_loop              Lightning Fabric
transformers_trainer     the Trainer of Hugging Face's transformers
hvdtrain_loop            hvdtrain.Loop
train_task               hvdtrain train
torchvision_operators    for a torchvision that is for another build of torch

They are run as files, `python torch_ddp.py FOLDER`: those of other systems import nothing of this
package but `same_work`, which lies beside them. `FOLDER/work.json` has the settings.
"""
