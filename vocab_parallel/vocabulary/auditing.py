"""What differs between two ordered tables, and what disagrees between a table and the model beside it."""

from __future__ import annotations

from vocab_parallel.vocabulary.identity import VocabIdentity


def first_difference(
    a: VocabIdentity, b: VocabIdentity, names: tuple[str, str] = ("the first", "the second")
) -> str | None:
    """In words, the first id whose token differs between two tables, or their sizes; None if the tables are equal."""
    if a.sha256 == b.sha256:
        return None
    for token_id in range(min(a.size, b.size)):
        if (a.kinds[token_id], a.tokens[token_id]) != (b.kinds[token_id], b.tokens[token_id]):
            return f"id {token_id} is {a.named(token_id)} in {names[0]} and {b.named(token_id)} in {names[1]}"
    larger, (name, other) = (a, names) if a.size > b.size else (b, names[::-1])
    smaller = min(a.size, b.size)
    return f"{name} has {larger.size:,} ids and {other} {smaller:,}: id {smaller} is {larger.named(smaller)}"


def audit(
    identity: VocabIdentity,
    *,
    embedding_rows: int | None = None,
    head_rows: int | None = None,
    config_vocab_size: int | None = None,
    emitted_max: int | None = None,
) -> list[str]:
    """Each disagreement between a vocabulary and the model beside it, in words; empty if there is none.

    Args:
        identity: the ordered table.
        embedding_rows: real rows of the input embedding.
        head_rows: real rows of the output head.
        config_vocab_size: what the model's configuration says.
        emitted_max: the largest id that the tokenizer was seen to emit.
    """
    lines = []
    rows = {"embedding rows": embedding_rows, "head rows": head_rows, "config vocab_size": config_vocab_size}
    for name, count in rows.items():
        if count is None or count == identity.size:
            continue
        what = f"rows {identity.size} to {count - 1} belong to no token"
        if count < identity.size:
            what = f"ids {count} to {identity.size - 1} have no row (the first is {identity.named(count)})"
        lines.append(f"{name} {count:,}, but the vocabulary has {identity.size:,} ids: {what}")
    if embedding_rows is not None and head_rows is not None and embedding_rows != head_rows:
        lines.append(f"embedding rows {embedding_rows:,}, but head rows {head_rows:,}: they cannot be tied")
    limit = min([identity.size, *[count for count in rows.values() if count is not None]])
    if emitted_max is not None and emitted_max >= limit:
        lines.append(f"the tokenizer emits id {emitted_max}, beyond the {limit:,} ids that all parts have")
    for role, token_id in identity.special_ids.items():
        if token_id >= limit:
            lines.append(f"special id {role} = {token_id} is beyond the {limit:,} ids that all parts have")
        if identity.kinds[token_id] == "unused":
            lines.append(f"special id {role} = {token_id} is an unused id")
    groups = identity.duplicates()
    for ids in groups[:10]:
        lines.append(f"ids {', '.join(map(str, ids))} are all {identity.named(ids[0])}")
    if len(groups) > 10:
        lines.append(f"and {len(groups) - 10} more groups of ids that are the same token")
    return lines
