(PK/'compat/finder.py').write_text(open('tools/rooms/finder.py').read())
h = ''
for mod, names in homes.items():
    h += f'    "{new("deepspeed."+mod)}": (\n' + ''.join(f'        "{n}",\n' for n in names) + '    ),\n'
(PK/'compat/utils/__init__.py').write_text(open('tools/rooms/utils_init.py').read().replace('HOMES}', h+'}', 1))

(PK/'compat/__init__.py').write_text('''"""Documented paths and names of release 0.19 that are nobody's room: the table that leads to our modules (`aliases.py`),
the import hook that follows it (`finder.py`), and code that exists for an old path alone. Nothing else imports it.

`deepspeed.compat` is itself a documented module, of the two functions below.
"""

from __future__ import annotations

from typing import Any

_ANNOTATIONS = ("get_annotations", "get_annotations_from_namespace")


def __getattr__(name: str) -> Any:
    if name not in _ANNOTATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepspeed.base import annotations

    return getattr(annotations, name)
''')
