import time, numpy as np, torch
from interp.model import load_model
from interp.text import load_text
from probes.activations import *
m=load_model("smollm2-135m",device="cpu",offline=True)
t=load_text("news",m,documents=200,context=128)
print(t, t.bos)
t0=time.time(); w=Windows.of(t,210_000); print("windows",time.time()-t0,len(w.ids),w.tokens,w.documents)
t0=time.time(); n=sum(len(d.windows)for d in t.rest()); print("all windows",n,time.time()-t0)
s=Stream(m,15,w,1024)
t0=time.time()
with m.measuring():
    s6=Stream(m,6,w,1024)
    x=s6.read(0,81920)
    print("81920 tokens to layer 6", time.time()-t0)
    np.save("/tmp/w/h/smol6.npy",x.numpy())
    t0=time.time(); k=sum(len(z.x) for z in judged(m,6,t)); print("judged",k,time.time()-t0)
    from interp import splice
    from interp.progress import batches
    sub=t.subset(list(range(8)))
    t0=time.time()
    for b in batches(m,sub,"auto"):
        splice.forward_scores(m,b)
    print("full forward 8 docs",sub.tokens,time.time()-t0)
