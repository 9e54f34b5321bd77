"""Release bundles: model, tokenizer, ties, optimizer and policy as one."""

from vocab_parallel.checkpoint.release.releases import list_bundles, open_current, promote, rollback, verify

__all__ = ["list_bundles", "open_current", "promote", "rollback", "verify"]
