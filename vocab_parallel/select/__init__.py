"""Token selection from sharded logits, without gathering them."""

from vocab_parallel.select.greedy import greedy
from vocab_parallel.select.logprobs import TopLogprobs, top_logprobs
from vocab_parallel.select.nucleus import Nucleus, top_p
from vocab_parallel.select.sampling import Sample, sample
from vocab_parallel.select.streams import Streams
from vocab_parallel.select.top_k import TopK, top_k

__all__ = ["Nucleus", "Sample", "Streams", "TopK", "TopLogprobs", "greedy", "sample", "top_k", "top_logprobs", "top_p"]
