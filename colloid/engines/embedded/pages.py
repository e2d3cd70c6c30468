"""Which page of the key-value cache belongs to whom: plain bookkeeping, no tensors.

The pages in use lie dense in two stacks that grow towards each other: `own` pages (of one sequence) from index 0
upwards, `shared` pages (full pages of a prompt that several samples read) from the last index downwards. Dense, so
that decode attention reads each stack as one view, without gathering. Released pages leave a hole, which the stack's
top page is moved into; `Page` objects are handles whose `index` follows such moves.

Invariants: own indices are 0 … n-1, shared ones size-m … size-1, n + m ≤ capacity = size - 1 (one page stays free, so
that a page can always change over from own to shared).
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Page:
    index: int
    shared: bool = False


class PageTable:
    """`copy(source, destination)` is called at once for every page whose content has to move."""

    def __init__(self, capacity: int, copy: Callable[[int, int], None]):
        self.capacity = capacity
        self.size = capacity + 1
        self.own: list[Page] = []
        self.shared: list[Page] = []
        self.layout_version = 0  # changes with every change of what lies where
        self._copy = copy

    @property
    def num_used(self) -> int:
        return len(self.own) + len(self.shared)

    def allocate(self) -> Page:
        """A new own page. The scheduler has reserved it; running out is a bug."""
        assert self.num_used < self.capacity, "no free page: admission must reserve what it hands out"
        page = Page(len(self.own))
        self.own.append(page)
        self.layout_version += 1
        return page

    def share(self, page: Page) -> None:
        """Moves an own page over to the shared stack."""
        destination = self.size - 1 - len(self.shared)
        self._copy(page.index, destination)
        self._fill_hole(self.own, page)
        page.index, page.shared = destination, True
        self.shared.append(page)

    def release(self, page: Page) -> None:
        self._fill_hole(self.shared if page.shared else self.own, page)

    def clear(self) -> None:
        self.own.clear()
        self.shared.clear()
        self.layout_version += 1

    def _fill_hole(self, stack: list[Page], page: Page) -> None:
        top = stack.pop()
        if top is not page:
            self._copy(top.index, page.index)
            position = self.size - 1 - page.index if page.shared else page.index
            stack[position] = top
            top.index = page.index
        self.layout_version += 1
