import sys, json, time
from jobs import Job
prec, scheds = sys.argv[1], sys.argv[2].split(",")
common=dict(size="10M",precision=prec,micro_batches=8,batch=1,context=256)
def show(name, out, actions=False):
    for r,o in enumerate(out):
        d=dict(o[-1]); act=d.pop("actions",None)
        best=min(x["wall"] for x in o)
        print(name,"rank",r,"best wall %.0f ms"%(best*1e3),{k:(round(v*1e3,1) if isinstance(v,float) and k not in("tail","lead") else v) for k,v in d.items()})
        if act and actions: print("   ", act)
def stat():
    return [int(x) for x in open("/proc/stat").readline().split()[1:]]
for s in scheds:
    b=stat()
    if s.startswith("plain"):
        n=int(s[5:] or 1); th=2 if s.endswith("t") else 1
        jobs=[Job("p","prof_rank:ProfRank",{"schedule":"plain",**common},ranks=1) for _ in range(n)]
        for j in jobs:
            for pr in j.processes: pr.stdin.write(json.dumps(["profile",{"steps":3}])+"\n"); pr.stdin.flush()
        for j in jobs: show(s, j._collect("profile"))
        for j in jobs: j.close()
    elif s=="threads2":
        with Job("p","prof_rank:ProfRank",{"schedule":"plain",**common},ranks=1,threads=2) as j: show(s,j.call("profile",steps=3))
    else:
        py=sys.executable
        with Job("p","prof_rank:ProfRank",{"schedule":s,**common},ranks=2) as j: show(s,j.call("profile",steps=3),True)
    e=stat(); print("   stat user nice sys idle iowait irq softirq steal", [y-x for x,y in zip(b,e)][:8], flush=True)
