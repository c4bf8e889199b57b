"""Move tests so that they mirror the rooms; re-runnable on a checkout in which the package has moved."""
import pathlib, re, subprocess, sys
R = pathlib.Path(sys.argv[1])
def git(*a): return subprocess.run(['git', '-C', str(R), *a], check=True, capture_output=True, text=True).stdout
T = {'utils': 'base', 'accelerator': 'base', 'op_builder': 'ops/op_builder', 'aio': 'ops/aio', 'io': 'ops/io', 'nvme': 'tools/nvme', 'lr_schedules': 'optim',
 'data_pipeline': 'data', 'dataloader': 'data', 'monitor': 'observe/monitor', 'profiling': 'observe/profiling', 'audit': 'observe/audit',
 'activation_checkpointing': 'transforms/recompute', 'linear': 'transforms/lora', 'pipe': 'parallel/pipeline', 'tensor_parallel': 'parallel/tensor',
 'sequence_parallel': 'parallel/sequence', 'moe': 'parallel/expert', 'memory_plan': 'planning/memory', 'step_plan': 'planning/step_time',
 'autotuning': 'tools/autotuning', 'launcher': 'tools/launcher', 'elasticity': 'tools/elastic'}
files = [f for f in git('ls-files').split('\n') if f and (R/f).exists()]
texts = {}
def get(f): return texts.get(f) or (R/f).read_text()
moves = {}
for f in files:
    if f.startswith('tests/data/'): moves[f] = 'tests/files/'+f.removeprefix('tests/data/')
    for a, b in T.items():
        if f.startswith(f'tests/{a}/'): moves[f] = f'tests/{b}/'+f.removeprefix(f'tests/{a}/')
seen = {}
for f, n in list(moves.items()):
    if n in seen or (n in files and n not in moves and n != f):
        if f.endswith('__init__.py'): moves[f] = None; continue
        raise SystemExit(f'{f} and {seen.get(n)} both to {n}')
    seen[n] = f
pat = re.compile(r'\btests\.('+'|'.join(T)+r')\.(?=[a-z_])')
fpat = re.compile(r'\bfrom tests\.('+'|'.join(T)+r') import')
ppat = re.compile(r'\btests/('+'|'.join(T)+r')(?=[/\s`"\'),]|$)', re.M)
for f in files:
    if not f.endswith(('.py', '.md', '.toml', '.yml', 'Makefile', '.ci/run', '.ci/torch_releases', '.txt')) or f.startswith(('benchmarks/results/',)): continue
    t = old = (R/f).read_text()
    t = t.replace('tests/data/', 'tests/files/').replace('tests/data`', 'tests/files`')
    t = pat.sub(lambda m: 'tests.'+T[m[1]].replace('/', '.')+'.', t)
    t = fpat.sub(lambda m: 'from tests.'+T[m[1]].replace('/', '.')+' import', t)
    t = ppat.sub(lambda m: 'tests/'+T[m[1]], t)
    if f.startswith('tests/') and f.endswith('.py'):
        t = re.sub(r'(parents?(?:\[\d\])?) / "data"', r'\1 / "files"', t)
        t = t.replace('parents[1] / "data/', 'parents[1] / "files/').replace('"tests" / "data"', '"tests" / "files"').replace('DATA / "data"', 'DATA / "files"')
        n = moves.get(f)
        if n and n.count('/') > f.count('/'):
            t = re.sub(r'(__file__\)(?:\.resolve\(\))?\.parents)\[(\d)\]', lambda m: f'{m[1]}[{int(m[2])+1}]', t)
            t = re.sub(r'(__file__\)(?:\.resolve\(\))?)\.parent\.parent\b', r'\1.parent.parent.parent', t)
    if t != old: (R/f).write_text(t)
for f, n in moves.items():
    if n is None: git('rm', '-qf', f); continue
    (R/n).parent.mkdir(parents=True, exist_ok=True); git('mv', '-k', f, n)
for d in sorted({p.parent for p in (R/'tests').rglob('*.py')}):
    while d != R/'tests':
        if not (d/'__init__.py').exists() and d.name != 'files' and 'files' not in d.relative_to(R/'tests').parts: (d/'__init__.py').write_text('')
        d = d.parent
f = R/'tests/planning/step_time/test_calibration.py'
if f.exists(): f.write_text(f.read_text().replace('("tests.planning.step_time.test_calibration:user_model", "tests.planning.step_time.test_calibration:user_batch")', '(f"{__name__}:user_model", f"{__name__}:user_batch")'))
git('add', '-A')
