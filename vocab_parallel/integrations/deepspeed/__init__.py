"""DeepSpeed: ZeRO 0 to 3 with the vocabulary sharded over tensor-parallel ranks, and one tied weight through all of it.

    with zero_init(shard, config=config):      # only for stage 3, and only to build what fits no rank
        model = Model(shard)
    engine, *_ = initialize(model, config=config)

`docs/hosts/deepspeed.md` has the seams, the traps and the limits.
"""

from __future__ import annotations

from vocab_parallel.integrations.deepspeed.checks import verify_tied
from vocab_parallel.integrations.deepspeed.mpu import GroupsMPU, MegatronMPU, data_parallel_group
from vocab_parallel.integrations.deepspeed.padding import Partition, partition_padding
from vocab_parallel.integrations.deepspeed.resize import resize
from vocab_parallel.integrations.deepspeed.setup import initialize, zero_init
from vocab_parallel.integrations.deepspeed.state import export, full_state_dict
from vocab_parallel.integrations.deepspeed.universal import to_universal

__all__ = [
    "GroupsMPU",
    "MegatronMPU",
    "Partition",
    "data_parallel_group",
    "export",
    "full_state_dict",
    "initialize",
    "partition_padding",
    "resize",
    "to_universal",
    "verify_tied",
    "zero_init",
]
