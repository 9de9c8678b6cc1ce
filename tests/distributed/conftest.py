import pytest

MODEL = ["model.width=32", "model.blocks=2", "model.heads=2", "model.length=16", "model.vocab_size=300"]
FAST = [
    "train.log_every=1",
    "train.two_samples=split",
    "train.valid_every=0",
    "optim.heads_learning_rate=5e-3",
    "optim.warmup_steps=3",
    "optim.learning_rate=1e-3",
]


@pytest.fixture(scope="session")
def base(tiny_data):
    """Overrides that make configs/demo.yaml a few-second run; losses then move, heads learn."""
    return [*MODEL, *FAST, f"data.train={tiny_data / 'train'}", f"data.valid={tiny_data / 'valid'}"]
