"""move.py ROOT: move every module to its room and rewrite imports, strings and paths. Re-runnable on a clean checkout."""
import ast, os, pathlib, re, subprocess, sys
sys.argv = [sys.argv[0], *sys.argv[1:]]
ROOT = pathlib.Path(sys.argv[1]); PK = ROOT/'deepspeed'
M = {}
for l in open('tools/rooms/map.txt'):
    l = l.strip()
    if l and not l.startswith('#'):
        a, b = [x.strip() for x in l.split('=')]; M['deepspeed.'+a] = 'deepspeed.'+b
def new(m):
    h, t = m, ''
    while h and h != 'deepspeed':
        if h in M: return M[h]+t
        h, _, x = h.rpartition('.'); t = '.'+x+t
    return m
def git(*a): return subprocess.run(['git', '-C', str(ROOT), *a], check=True, capture_output=True, text=True).stdout
files = [f for f in git('ls-files').split('\n') if f]
mods = {}
for f in files:
    if f.startswith('deepspeed/') and f.endswith('.py'):
        mods['.'.join(pathlib.Path(f).with_suffix('').parts).removesuffix('.__init__')] = f
pkgs = {m for m, f in mods.items() if f.endswith('__init__.py')}
sys.path.insert(0, str(ROOT))
ns = {}; exec(open(PK/'_compat/aliases.py').read(), ns); ALIAS = dict(ns['MODULES']); NAMES = ns['NAMES']; SUB = ns['SUBMODULES']
def resolve_alias(m):
    h, t = m, ''
    while '.' in h:
        if h in ALIAS: return ALIAS[h]+t
        h, _, x = h.rpartition('.'); t = '.'+x+t
    return m
def real(m):
    """The old real module behind a path, or None."""
    if m in mods: return m
    r = resolve_alias(m)
    return r if r in mods else None
LATERM = re.findall(r'^\s*"(deepspeed[\w.]+)": \(', open(PK/'_compat/later_table.py').read(), re.M)+re.findall(r'^\[(deepspeed[\w.]+)\]', open(PK/'_compat/later_names.txt').read(), re.M)
# names of the deepspeed.utils table
un = {}; src = open(PK/'utils/__init__.py').read(); tree = ast.parse(src)
for n in tree.body:
    if isinstance(n, ast.Assign) and n.targets[0].id == '_HOMES': homes = ast.literal_eval(n.value)
UT = {name: 'deepspeed.'+h for h, ns_ in homes.items() for name in ns_}
for x in ('log_dist', 'log_dist_once', 'logger', 'set_log_level_from_string', 'warning_once'): UT[x] = 'deepspeed.utils.logging'
UT['z3_leaf_module'] = 'deepspeed.utils.z3_leaf_module'

def rewrite_imports(text, module, is_pkg, keep_documented=False):
    tree = ast.parse(text); lines = text.split('\n'); edits = []
    pack = module if is_pkg else (module.rpartition('.')[0] if module else '')
    for n in ast.walk(tree):
        if isinstance(n, ast.Import):
            if not any(a.name.startswith('deepspeed.') and real(a.name) and new(real(a.name)) != a.name for a in n.names): continue
            out = []
            for a in n.names:
                r = real(a.name)
                if r is None or keep_documented and a.name in DOCUMENTED: out.append(f'import {a.name}'+(f' as {a.asname}' if a.asname else '')); continue
                out.append(f'import {new(r).replace("deepspeed", MARK, 1)}'+(f' as {a.asname}' if a.asname else ''))
            edits.append((n, out))
        elif isinstance(n, ast.ImportFrom):
            base = n.module or ''
            if n.level:
                if not module: continue
                parts = pack.split('.'); base = '.'.join(parts[:len(parts)-n.level+1]+([n.module] if n.module else []))
            if not base.startswith('deepspeed') : continue
            groups = {}
            changed = bool(n.level)
            for a in n.names:
                full = f'{base}.{a.name}'
                if keep_documented and (full in DOCUMENTED or base in DOCUMENTED):
                    groups.setdefault(base, []).append((a.name, a.asname)); continue
                r = real(full)
                if base == 'deepspeed.utils' and a.name in UT and not (r and a.name != 'z3_leaf_module'):
                    groups.setdefault(new(UT[a.name]), []).append((a.name, a.asname)); changed = True
                elif r:
                    p = new(r); parent, _, leaf = p.rpartition('.')
                    asname = a.asname or (a.name if a.name != leaf else None)
                    if asname == leaf: asname = None
                    groups.setdefault(parent, []).append((leaf, asname)); changed |= parent != base or leaf != a.name
                else:
                    rb = real(base); t = new(rb) if rb else base
                    groups.setdefault(t, []).append((a.name, a.asname)); changed |= t != base
            if changed:
                edits.append((n, [f"from {b.replace('deepspeed', MARK, 1)} import "+', '.join(x+(f' as {y}' if y else '') for x, y in v) for b, v in groups.items()]))
    for n, out in sorted(edits, key=lambda e: -e[0].lineno):
        i, j = n.lineno-1, n.end_lineno
        tail = lines[j-1][len(lines[j-1].encode()[:n.end_col_offset].decode()):]
        head = lines[i][:n.col_offset]
        comment = tail.strip()
        new_lines = []
        for k, o in enumerate(out):
            pre = head if k == 0 else re.match(r'\s*', head).group() if not head.strip() else None
            if pre is None: pre = ''; new_lines[-1] += '; '+o; continue
            new_lines.append(pre+o)
        # keep a trailing comment or statement
        if comment: new_lines[0 if comment.startswith('#') else -1] += ('  ' if comment.startswith('#') else '')+(comment if comment.startswith('#') else tail)
        lines[i:j] = new_lines
    return '\n'.join(lines)
MARK = 'dEEpspeed'
DOTTED = re.compile(r'(?<![\w.])deepspeed(?:\.[A-Za-z_]\w*)+')
def rewrite_dotted(text, keep):
    def sub(m):
        p = m.group(); h, t = p, ''
        while '.' in h:
            if h in TABLE_ONLY: return p
            r = h if h in mods else None
            if r:
                if keep(p, h): return p
                return new(r)+t
            if h in ALIAS and not keep(p, h) and real(h): return new(real(h))+t
            h, _, x = h.rpartition('.'); t = '.'+x+t
        return p
    return DOTTED.sub(sub, text)
# documented module paths
DOCUMENTED = set()
def doc(p):
    while '.' in p: DOCUMENTED.add(p); p = p.rpartition('.')[0]
for l in open(ROOT/'tests/data/documented_names.txt'):
    if l.startswith('['): doc(l.strip()[1:-1])
for f in ('tests/data/documented_paths.txt', 'tests/data/surface_due.txt', 'tests/data/surface_later.txt', '../shared/reference/NAMES_USED.txt', '../shared/reference/NAMES_CHECKED.txt'):
    for m in re.findall(r'deepspeed(?:\.\w+)+', open(ROOT/f).read()): doc(m)
for k in [*ALIAS, *NAMES, *SUB]: 
    if k not in mods or k in DOCUMENTED: doc(k)
for k, v in SUB.items():
    for x in v: doc(f'{k}.{x}')
TABLE_ONLY = {k for k in [*NAMES, *SUB, *LATERM] if k not in mods and not real(k)}
pathmap = {}
for m, f in mods.items():
    nm = new(m); nf = nm.replace('.', '/')+('/__init__.py' if m in pkgs else '.py')
    pathmap[f] = nf
other = [f for f in files if f.startswith('deepspeed/') and not f.endswith('.py')]
for f in other:
    d = '.'.join(pathlib.Path(f).parent.parts); pathmap[f] = (new(d) if d in mods else d).replace('.', '/')+'/'+pathlib.Path(f).name
dup = {}
for f, nf in pathmap.items(): dup.setdefault(nf, []).append(f)
DROP = {}
for nf, fs in dup.items():
    if len(fs) > 1:
        assert nf.endswith('__init__.py'), (nf, fs)
        # the package whose own content counts stays; those with a docstring alone go
        keepers = [f for f in fs if len((ROOT/f).read_text().strip().split('\n')) > 2 and f != 'deepspeed/utils/__init__.py']
        assert len(keepers) <= 1, (nf, fs, keepers)
        k = keepers[0] if keepers else fs[0]
        for f in fs:
            if f != k: DROP[f] = nf
DROP['deepspeed/nebula/__init__.py'] = ''
pathmap['deepspeed/utils/__init__.py'] = 'deepspeed/compat/utils/__init__.py'; DROP.pop('deepspeed/utils/__init__.py', None)
# suffix -> new for path mentions
suffix = {}
for f, nf in pathmap.items():
    s = f.removeprefix('deepspeed/'); parts = s.split('/')
    for i in range(len(parts)-1):
        suffix.setdefault('/'.join(parts[i:]), set()).add((f, nf))
PATHTOK = re.compile(r'(?<![\w/.-])((?:deepspeed/)?(?:[\w]+/)+[\w]+\.(?:py|html|txt))\b')
DIRTOK = re.compile(r'(?<![\w/.-])((?:deepspeed/)?(?:[\w]+/)+[\w]+)(?=/?[`\s,;:)])')
def rewrite_paths(text):
    def sub(m):
        t = m.group(1)
        if t in pathmap: return pathmap[t]
        if t.startswith('deepspeed/') : return t
        c = suffix.get(t)
        if c and len(c) == 1:
            f, nf = next(iter(c)); return nf.removeprefix('deepspeed/')
        return t
    text = PATHTOK.sub(sub, text)
    def subd(m):
        t = m.group(1); d = t.removeprefix('deepspeed/').replace('/', '.')
        if 'deepspeed.'+d in pkgs:
            n = new('deepspeed.'+d).replace('.', '/')
            return n if t.startswith('deepspeed/') else n.removeprefix('deepspeed/')
        return t
    return DIRTOK.sub(subd, text)
HANDS = {'deepspeed/_compat/later_table.py', 'deepspeed/_compat/later_names.txt', 'deepspeed/_compat/aliases.py'}
def in_package(p, h): return False
def keep_doc(p, h): return h in DOCUMENTED
texts = {}
for f in files:
    if f.startswith('tests/data/') or f.startswith('benchmarks/results/') or f in HANDS: continue
    if not f.endswith(('.py', '.md', '.toml', '.yml', '.cpp', '.h', '.txt', 'Makefile', '.ci/run', '.ci/torch_releases', '.json')): continue
    text = old = (ROOT/f).read_text()
    if f.endswith('.py'):
        mod = next((m for m, x in mods.items() if x == f), '') if f.startswith('deepspeed/') else ''
        user = f.startswith(('examples/', 'benchmarks/')) or 'tests/clients/' in f or f in ('tests/test_documented_names.py', 'tests/test_aliases.py', 'tests/test_import.py', 'tests/test_interface.py')
        text = rewrite_imports(text, mod, f.endswith('__init__.py'), keep_documented=user)
        text = rewrite_dotted(text, in_package if f.startswith('deepspeed/') and f != 'deepspeed/__init__.py' or f.startswith('tests/') and not user else keep_doc)
    else: text = rewrite_dotted(text, keep_doc)
    text = rewrite_paths(text).replace(MARK, 'deepspeed')
    if text != old: texts[f] = text
# aliases.py: values only
al = (ROOT/'deepspeed/_compat/aliases.py').read_text(); tree = ast.parse(al); edits = []
keys = set()
for n in ast.walk(tree):
    if isinstance(n, ast.Dict):
        for k in n.keys:
            if k is not None: keys.add(id(k))
for n in ast.walk(tree):
    if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.startswith('deepspeed.') and n.lineno == n.end_lineno:
        p, c, r = n.value.partition(':')
        if id(n) in keys:
            if p in mods and p not in DOCUMENTED and new(p) != p: edits.append((n, new(p)))
            continue
        q = real(p)
        if q and new(q) != p: edits.append((n, new(q)+c+r))
ls = al.split('\n')
for n, v in sorted(edits, key=lambda e: (-e[0].lineno, -e[0].col_offset)):
    l = ls[n.lineno-1]; ls[n.lineno-1] = l[:n.col_offset]+'"'+v+'"'+l[n.end_col_offset:]
al = '\n'.join(ls)
# rows for documented modules that moved
rows = dict()
for k, v in ALIAS.items(): rows[k] = new(real(v) or v)
scattered = {'deepspeed.runtime', 'deepspeed.profiling', 'deepspeed.runtime.comm', 'deepspeed.nebula'}
def via(rows, m):
    h, t = m, ''
    while '.' in h:
        if h in rows: return rows[h]+t
        h, _, x = h.rpartition('.'); t = '.'+x+t
    return m
for p in sorted(DOCUMENTED, key=lambda p: p.count('.')):
    if p in mods and p not in scattered and p != 'deepspeed.utils':
        if via(rows, p) != new(p): rows[p] = new(p)
    elif p not in mods and p not in rows and via(rows, p) != p and not real(p): pass
rows['deepspeed.utils'] = 'deepspeed.compat.utils'
rows.pop('deepspeed.zero', None)
for a, b in (('deepspeed.runtime.zero.', 'deepspeed.zero.'), ('deepspeed.runtime.pipe.', 'deepspeed.pipe.')):
    for k in [k for k in rows if k.startswith(a)]:
        rows.setdefault(b+k.removeprefix(a), rows[k])
rows = {k: v for k, v in rows.items() if k != v and k != 'deepspeed.compat'}
body = 'MODULES = {\n'+''.join(f'    "{k}": "{v}",\n' for k, v in sorted(rows.items()))+'}\n'
al = re.sub(r'MODULES = \{\n.*?\n\}\n', lambda m: body, al, count=1, flags=re.S)
texts['deepspeed/_compat/aliases.py'] = al
for f, t in texts.items(): (ROOT/f).write_text(t)
for f in DROP: git('rm', '-qf', f); pathmap.pop(f)
for f, nf in pathmap.items():
    if f != nf:
        (ROOT/nf).parent.mkdir(parents=True, exist_ok=True); git('mv', '-k', f, nf)
# packages without __init__
for d in sorted({p.parent for p in PK.rglob('*.py')}):
    while d != PK:
        if not (d/'__init__.py').exists(): (d/'__init__.py').write_text('"""%s."""\n' % d.name); print('made', d.relative_to(ROOT))
        d = d.parent
for d in sorted(PK.rglob('*'), reverse=True):
    if d.is_dir() and (d.name == '__pycache__' or not any(d.iterdir())):
        import shutil; shutil.rmtree(d, ignore_errors=True)
print('rows', len(rows), 'dropped', DROP)
import importlib
exec(open('tools/rooms/hand.py').read())
git('add', '-A')
