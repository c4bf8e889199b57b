"""Blocks of the paged cache: who uses which, and whose contents can be shared. Pure bookkeeping; no tensors.

W. Kwon et al.: Efficient memory management for large language model serving with PagedAttention, 2023. Keys and values
of a sequence lie in blocks of so many tokens, anywhere in the cache. Sequences that begin with the same tokens share
the full blocks of that prefix (L. Zheng et al.: SGLang, 2024); a block that nobody uses any more keeps its content
until it is needed for something else, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field

from deepspeed.base.exceptions import ExplainedError

ROOT = 0
"""The key of an empty prefix."""


_SPANS = 2**16
"""More than any model has."""


class OutOfBlocksError(ExplainedError, RuntimeError):
    """More blocks were asked for than nobody uses."""


class BlockPool:
    """``num_blocks`` blocks, numbered from 0.

    The content of a full block is identified by a *key*: a number that stands for its tokens and all before them. It is
    found by comparing tokens, not hashes of them, so that two prefixes are never taken for each other.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: a cache has at least one block")
        self.num_blocks = num_blocks
        self._uses = [0] * num_blocks
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # the next one first
        self._known: dict[
            tuple[int, tuple[int, ...]], tuple[int, int]
        ] = {}  # (parent, tokens) -> (key, block)
        self._content: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> (parent, tokens)
        self._last_key = ROOT

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._unused)

    def uses(self, block: int) -> int:
        """Return the number of sequences that use ``block``."""
        return self._uses[block]

    def allocate(self, count: int = 1) -> list[int]:
        """Blocks for new content; what they held can be found no longer. OutOfBlocksError: there are not as many."""
        if count > len(self._unused):
            raise OutOfBlocksError(
                f"{count} blocks asked for, {len(self._unused)} of {self.num_blocks} unused"
            )
        taken = []
        for _ in range(count):
            block, _ = self._unused.popitem(last=False)
            content = self._content.pop(block, None)
            if content is not None:
                del self._known[content]
            self._uses[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """One more sequence uses ``block``."""
        if self._uses[block] == 0:
            del self._unused[block]
        self._uses[block] += 1

    def release(self, block: int) -> None:
        """One sequence fewer uses ``block``. A sequence gives back its last block first: so a block's content is
        forgotten before that of those that lead to it."""
        if self._uses[block] < 1:
            raise ValueError(f"block {block} is released, but nobody uses it")
        self._uses[block] -= 1
        if self._uses[block] == 0:
            self._unused[block] = None
            self._unused.move_to_end(block, last=block in self._content)

    def find(self, parent: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """(key, block) of these tokens after the prefix ``parent``."""
        return self._known.get((parent, tokens))

    def publish(self, block: int, parent: int, tokens: tuple[int, ...]) -> int:
        """``block``, in use, holds ``tokens`` after the prefix ``parent``, and can be found from now on. Returns the
        key; if another block holds the same already, that one stays the one to be found."""
        content = (parent, tokens)
        found = self._known.get(content)
        if found is not None:
            return found[0]
        self._last_key += 1
        self._known[content] = (self._last_key, block)
        self._content[block] = content
        return self._last_key


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in its order. ``published`` of them, full ones, can be found; ``key`` is the last
    one's. ``span``: of the sequence when it began (`BlockManager.match_prefix`). ``adapter``: the number of
    the one that makes its keys and values; 0: none."""

    blocks: list[int] = field(default_factory=list)
    published: int = 0
    key: int = ROOT
    span: int = 0
    adapter: int = 0


@dataclass(eq=False)
class BlockManager:
    """The tables of sequences over one pool, ``block_size`` tokens to a block.

    ``sharing=False``: sequences share nothing (a cache that does not keep all tokens of all layers cannot).
    ``span``: the span of a sequence of so many tokens (`inference/model/rotations.py`); only those of one span share
    blocks.
    """

    pool: BlockPool
    block_size: int
    _: KW_ONLY
    sharing: bool = True
    span: Callable[[int], int] = lambda _: 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: a block holds at least one token")

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits alone."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, length: int) -> int:
        """Blocks that ``length`` tokens take."""
        return -(-length // self.block_size)

    def missing(self, table: BlockTable, length: int) -> int:
        """Further blocks that the table needs for ``length`` tokens."""
        return max(0, self.blocks_for(length) - len(table.blocks))

    def room(self, table: BlockTable) -> int:
        """The longest length for which the pool has blocks now."""
        return (len(table.blocks) + self.pool.num_free) * self.block_size

    def match_prefix(self, table: BlockTable, tokens: Sequence[int], *, share: bool = True) -> int:
        """Give an empty table the blocks of other sequences that hold a prefix of ``tokens``, though never all of
        it: the last token has to be computed. Returns how many tokens they hold; none without ``share``."""
        table.span = self.span(len(tokens))
        table.key = _root(table.span, table.adapter)
        for key, block in self._found(tokens, table.adapter) if share else ():
            self.pool.share(block)
            table.blocks.append(block)
            table.key = key
        table.published = len(table.blocks)
        return table.published * self.block_size

    def found_in_use(self, tokens: Sequence[int], adapter: int = 0) -> int:
        """Count the blocks that ``match_prefix`` would share with running sequences: they cost nothing."""
        return sum(self.pool.uses(block) > 0 for _, block in self._found(tokens, adapter))

    def _found(self, tokens: Sequence[int], adapter: int) -> Iterator[tuple[int, int]]:
        key, size = _root(self.span(len(tokens)), adapter), self.block_size
        for index in range((len(tokens) - 1) // size if self.sharing else 0):
            found = self.pool.find(key, tuple(tokens[index * size : (index + 1) * size]))
            if found is None:
                return
            yield found
            key = found[0]

    def restart(self, table: BlockTable, length: int) -> None:
        """The sequence is computed anew as one of ``length`` tokens; it shares no prefix."""
        self.release(table)
        table.span = self.span(length)
        table.key = _root(table.span, table.adapter)

    def reserve(self, table: BlockTable, length: int) -> bool:
        """Blocks for ``length`` tokens in all. False, and nothing happens, if there are not enough."""
        missing = self.missing(table, length)
        if missing > self.pool.num_free:
            return False
        if missing:
            table.blocks.extend(self.pool.allocate(missing))
        return True

    def trim(self, table: BlockTable, length: int) -> None:
        """Give back the blocks behind those for ``length`` tokens."""
        while len(table.blocks) > self.blocks_for(length):
            self.pool.release(table.blocks.pop())

    def publish(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """The keys and values of the first ``computed`` tokens are in the cache: full blocks can be shared."""
        if not self.sharing:
            return
        size = self.block_size
        for index in range(table.published, computed // size):
            content = tuple(tokens[index * size : (index + 1) * size])
            table.key = self.pool.publish(table.blocks[index], table.key, content)
            table.published = index + 1

    def release(self, table: BlockTable) -> None:
        """The sequence is gone, or starts anew."""
        for block in reversed(table.blocks):
            self.pool.release(block)
        table.blocks.clear()
        table.published, table.key = 0, _root(table.span, table.adapter)


def _root(span: int, adapter: int) -> int:
    """The key of an empty prefix of sequences of ``span`` and ``adapter``; blocks have positive keys."""
    return ROOT - span - _SPANS * adapter
