import os, time, resource
from pipeline_gpt import PipelineRank
import torch, torch.distributed as dist

class ProfRank(PipelineRank):
    def profile(self, steps=3):
        from deepspeed.runtime.pipe import stage_run
        S = stage_run.StageRun
        rec = []
        T = time.perf_counter
        def wrap(name):
            old = getattr(S, name)
            def new(self_, action, left):
                t=T(); c=time.process_time(); old(self_, action, left); rec.append((str(action), t, T(), time.process_time()-c))
            setattr(S, name, new); return old
        if self.engine is not None and "_links" in dir(self.engine):
            olds = {n: wrap(n) for n in ("_forward","_backward","_weights")}
            waits=[]; sends=[]
            for _, ch in self.engine.pipe_channels():
                if hasattr(ch,"receive"):
                    def mk(ch, old=None):
                        old=ch.receive
                        def r(left=0):
                            t=T(); v=old(left); waits.append(T()-t); return v
                        ch.receive=r
                    mk(ch)
                else:
                    def mk2(ch):
                        old=ch.send
                        def r(v):
                            t=T(); old(v); sends.append(T()-t)
                        ch.send=r
                    mk2(ch)
        out=[]
        for _ in range(steps):
            if dist.is_initialized(): dist.barrier()
            rec.clear()
            if self.engine is not None: waits.clear(); sends.clear()
            u0=resource.getrusage(resource.RUSAGE_SELF); t=T(); c=time.process_time(); th=time.thread_time()
            self.step()
            t1=T(); u=resource.getrusage(resource.RUSAGE_SELF)
            d=dict(wall=t1-t,cpu=time.process_time()-c,main=time.thread_time()-th,sys=u.ru_stime-u0.ru_stime,minflt=u.ru_minflt-u0.ru_minflt,nv=u.ru_nvcsw-u0.ru_nvcsw,niv=u.ru_nivcsw-u0.ru_nivcsw)
            if self.engine is not None:
                d["waits"]=sum(waits); d["waitmax"]=max(waits,default=0); d["sends"]=sum(sends)
                d["actions"]=[(n, round((a-t)*1e3,1), round((b-a)*1e3,1), round(cc*1e3,1)) for n,a,b,cc in rec]
                kinds={}
                for n,a,b,cc in rec: kinds.setdefault(n[0],[]).append(cc)
                d["kinds"]={k:round(sum(v)/len(v)*1e3,1) for k,v in kinds.items()}
                d["tail"]=round((t1-rec[-1][2])*1e3,1)
                d["lead"]=round((rec[0][1]-t)*1e3,1)
            out.append(d)
        return out
