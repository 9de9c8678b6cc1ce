"""The two files that an export carries. They import torch, numpy and transformers only."""
