#!/bin/bash
# Move the package to its rooms, in a clean checkout: tools/rooms/run.sh, from the root of the repository.
set -e
python=.venv/bin/python
root=$PWD
work=$(mktemp -d); cp -r tools/rooms "$work/"
for file in "$work"/rooms/*.py; do sed -i "s#tools/rooms#$work/rooms#g" "$file"; done
git rm -rqf tools/rooms
tidy() { .venv/bin/ruff check --fix -q . >/dev/null || true; .venv/bin/ruff format -q .; }
$python "$work/rooms/move.py" "$root"; tidy
$python "$work/rooms/handfix.py" "$root"; tidy
$python "$work/rooms/wrap.py" "$root"; tidy
$python "$work/rooms/tests_move.py" "$root"; tidy
$python tools/draw_diagrams.py
