"""All that ranks import, also what the engines import late: the server imports this once, before it forks."""
# ruff: noqa: F401

import gc

import deepspeed.comm.mori
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.original_muon
import torch._dynamo.trace_rules
import torch.distributed.checkpoint._fsspec_filesystem

import lomdm_dist.cli
import lomdm_dist.parallel.fsdp2
import lomdm_dist.parallel.tensor
import lomdm_dist.parallel.zero
import lomdm_dist.train.loop

gc.freeze()  # else each rank's collector walks, and so copies, what it shares with the server
