
import json, re, subprocess, sys, pathlib
R = sys.argv[1]
for _ in range(6):
    out = subprocess.run([R+'/.venv/bin/ruff','check','--select','E501','--output-format','json','.'],cwd=R,capture_output=True,text=True).stdout
    rows = json.loads(out)
    if not rows: break
    done = set()
    for r in sorted(rows, key=lambda r: -r['location']['row']):
        f = pathlib.Path(r['filename']); i = r['location']['row']-1
        ls = f.read_text().split('\n'); l = ls[i]
        cut = l.rfind(' ', 0, 119); ind = re.match(r'\s*(# )?', l).group()
        if l.lstrip().startswith(('f"', '"', "f'")) and not l.lstrip().startswith('"""'): print('by hand', f, i+1); continue
        rest = l[cut+1:]
        nxt = ls[i+1] if i+1 < len(ls) else ''
        ni = re.match(r'\s*(# )?', nxt).group()
        if nxt.strip() and ni == ind and not nxt.strip().startswith(('"""', '-', '*', '|')) and not rest.endswith('"""') and not rest.endswith(('.', ':')):
            ls[i:i+2] = [l[:cut], ind+rest+' '+nxt.strip()]
        else: ls[i:i+1] = [l[:cut], ind+rest]
        f.write_text('\n'.join(ls))
