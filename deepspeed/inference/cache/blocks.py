"""Allocation and sharing of the blocks of the paged KV cache. Pure bookkeeping; no tensors.

W. Kwon et al.: Efficient memory management for large language model serving with PagedAttention, 2023. Keys and values
of a sequence lie in fixed-size blocks of tokens, anywhere in the cache. Sequences with a common prefix share its full
blocks (L. Zheng et al.: SGLang, 2024). A free block keeps its content until it is reallocated, least recently used
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field

from deepspeed.base.exceptions import ExplainedError

ROOT = 0
"""The key of an empty prefix."""


_SPANS = 2**16
"""Exceeds the number of position spans of any model."""


class OutOfBlocksError(ExplainedError, RuntimeError):
    """More blocks were requested than are free."""


class BlockPool:
    """``num_blocks`` blocks, numbered from 0.

    The content of a full block is identified by a *key*: a number that stands for its tokens and all before them. Keys
    are looked up by comparing tokens, not hashes of them, so two different prefixes never collide.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: must be at least 1")
        self.num_blocks = num_blocks
        self._uses = [0] * num_blocks
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in order of reuse
        self._known: dict[
            tuple[int, tuple[int, ...]], tuple[int, int]
        ] = {}  # (parent, tokens) -> (key, block)
        self._content: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> (parent, tokens)
        self._last_key = ROOT

    @property
    def num_free(self) -> int:
        """Number of blocks that no sequence uses."""
        return len(self._unused)

    def uses(self, block: int) -> int:
        """Return the number of sequences that use ``block``."""
        return self._uses[block]

    def allocate(self, count: int = 1) -> list[int]:
        """Take ``count`` free blocks and evict their content from the prefix cache.

        OutOfBlocksError: fewer are free.
        """
        if count > len(self._unused):
            raise OutOfBlocksError(
                f"{count} blocks requested, but only {len(self._unused)} of {self.num_blocks} are free"
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
        """Add a reference to ``block``."""
        if self._uses[block] == 0:
            del self._unused[block]
        self._uses[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference to ``block``. A sequence releases its last block first, so that a block is evicted before
        the blocks of its prefix."""
        if self._uses[block] < 1:
            raise ValueError(f"block {block} was released, but is not in use")
        self._uses[block] -= 1
        if self._uses[block] == 0:
            self._unused[block] = None
            self._unused.move_to_end(block, last=block in self._content)

    def find(self, parent: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """Look up ``tokens`` after the prefix ``parent``; return (key, block)."""
        return self._known.get((parent, tokens))

    def publish(self, block: int, parent: int, tokens: tuple[int, ...]) -> int:
        """Enter ``block``, which is in use and holds ``tokens`` after the prefix ``parent``, in the prefix cache.
        Return the key. If another block already holds the same content, that one stays."""
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
    """The blocks of one sequence, in order. The first ``published`` of them, all full, are in the prefix cache; ``key``
    is the key of the last of these. ``span``: the position span of the sequence when it was admitted
    (`BlockManager.match_prefix`). ``adapter``: number of the adapter that computes its keys and values; 0: none."""

    blocks: list[int] = field(default_factory=list)
    published: int = 0
    key: int = ROOT
    span: int = 0
    adapter: int = 0


@dataclass(eq=False)
class BlockManager:
    """Block tables over one pool, with ``block_size`` tokens per block.

    ``sharing=False`` disables prefix sharing, for a cache that does not keep all tokens of all layers.
    ``span`` maps a sequence length to its position span (`inference/model/rotations.py`); only sequences of the same
    span share blocks.
    """

    pool: BlockPool
    block_size: int
    _: KW_ONLY
    sharing: bool = True
    span: Callable[[int], int] = lambda _: 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: must be at least 1")

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest sequence that fits alone."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, length: int) -> int:
        """Return the number of blocks for ``length`` tokens."""
        return -(-length // self.block_size)

    def missing(self, table: BlockTable, length: int) -> int:
        """Return how many more blocks the table needs for ``length`` tokens."""
        return max(0, self.blocks_for(length) - len(table.blocks))

    def room(self, table: BlockTable) -> int:
        """Return the longest length, in tokens, that the free blocks allow now."""
        return (len(table.blocks) + self.pool.num_free) * self.block_size

    def match_prefix(self, table: BlockTable, tokens: Sequence[int], *, share: bool = True) -> int:
        """Fill an empty table with cached blocks that hold a prefix of ``tokens``, short of the last token, which must
        be computed. Return the number of tokens they hold; 0 without ``share``."""
        table.span = self.span(len(tokens))
        table.key = _root(table.span, table.adapter)
        for key, block in self._found(tokens, table.adapter) if share else ():
            self.pool.share(block)
            table.blocks.append(block)
            table.key = key
        table.published = len(table.blocks)
        return table.published * self.block_size

    def found_in_use(self, tokens: Sequence[int], adapter: int = 0) -> int:
        """Count the blocks that ``match_prefix`` would share with running sequences: these take no free block."""
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
        """Reset the table for recomputation as a sequence of ``length`` tokens; shares no prefix."""
        self.release(table)
        table.span = self.span(length)
        table.key = _root(table.span, table.adapter)

    def reserve(self, table: BlockTable, length: int) -> bool:
        """Allocate blocks for ``length`` tokens in total. Return False, changing nothing, if too few are free."""
        missing = self.missing(table, length)
        if missing > self.pool.num_free:
            return False
        if missing:
            table.blocks.extend(self.pool.allocate(missing))
        return True

    def trim(self, table: BlockTable, length: int) -> None:
        """Release the blocks beyond ``length`` tokens."""
        while len(table.blocks) > self.blocks_for(length):
            self.pool.release(table.blocks.pop())

    def publish(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Enter the full blocks of the first ``computed`` tokens, whose keys and values are cached, for sharing."""
        if not self.sharing:
            return
        size = self.block_size
        for index in range(table.published, computed // size):
            content = tuple(tokens[index * size : (index + 1) * size])
            table.key = self.pool.publish(table.blocks[index], table.key, content)
            table.published = index + 1

    def release(self, table: BlockTable) -> None:
        """Release all blocks: the sequence has ended or restarts."""
        for block in reversed(table.blocks):
            self.pool.release(block)
        table.blocks.clear()
        table.published, table.key = 0, _root(table.span, table.adapter)


def _root(span: int, adapter: int) -> int:
    """Return the key of the empty prefix for ``span`` and ``adapter``: not positive, unlike keys of blocks."""
    return ROOT - span - _SPANS * adapter
