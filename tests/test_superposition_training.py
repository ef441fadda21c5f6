"""Training: the saved SAE is the trained one, sparsity is sparsity, the same seed is the same."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from interp import journal
from interp.errors import InterpError
from probes.training import COUNTERS, Job, Plan, finished, from_files

D, WIDTH, K, BATCH = 16, 3, 4, 128
ARCHS = ["topk", "batchtopk", "jumprelu", "standard", "gated"]


@pytest.fixture(scope="module")
def x():
    """Activations of 24 sparse directions in 16 dimensions, far from 0, of no unit scale."""
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((24, D))
    strengths = rng.uniform(0.5, 1.5, (6000, 24)) * (rng.random((6000, 24)) < 0.1)
    return torch.from_numpy(30 * (strengths @ directions) + 11).float()


def plan(arch="topk", **changes):
    fields = {
        "name": "sae",
        "arch": arch,
        "d_in": D,
        "d_sae": WIDTH * D,
        "k": K,
        "sparsity": None,
        "seed": 0,
        "lr": 3e-3,
        "batch": BATCH,
        "tokens": 5120,
    }
    return Plan(**(fields | changes))


def untrained(x, wanted):
    scale = float(D**0.5 / x.norm(dim=1).mean())
    return Job(wanted, scale, x.mean(0).double(), torch.device("cpu"))


def batches(job, x, passes=1):
    """What it is trained on, 40 batches in each of a few passes over one block."""
    orders = [job.order(block, 5120) for block in range(passes)]
    return [x[chosen] for order in orders for chosen in order.split(BATCH)]


def trained(x, wanted, passes=1):
    job = untrained(x, wanted)
    for batch in batches(job, x, passes):
        job.step(batch)
    return job


@pytest.fixture(scope="module")
def jobs(x):
    return {arch: trained(x, plan(arch)) for arch in ARCHS}


@pytest.fixture(scope="module")
def elsewhere(jobs, x, tmp_path_factory):
    """What SAELens in another process makes of raw activations with the saved files."""
    root = tmp_path_factory.mktemp("saes")
    np.save(root / "x.npy", x[5120:].numpy())
    for arch, job in jobs.items():
        (root / arch).mkdir()
        for name, contents in finished(job, x[:2048], {"hook_name": "here"}).items():
            (root / arch / name).write_bytes(contents)
    code = """
import sys, numpy as np, torch
from pathlib import Path
from sae_lens import SAE
root = Path(sys.argv[1])
x = torch.from_numpy(np.load(root / "x.npy"))
for arch in sys.argv[2:]:
    sae = SAE.load_from_disk(root / arch)
    assert sae.cfg.metadata.hook_name == "here"
    with torch.no_grad():
        acts = sae.encode(x)
        np.savez(root / f"{arch}.npz", acts=acts, hat=sae.decode(acts), decoder=sae.W_dec)
"""
    subprocess.run([sys.executable, "-c", code, str(root), *ARCHS], check=True)
    return {arch: np.load(root / f"{arch}.npz") for arch in ARCHS}


@pytest.mark.parametrize("arch", ["topk", "jumprelu", "standard", "gated"])
def test_saved_sae_is_the_trained_one(arch, jobs, elsewhere, x):
    """On raw activations, in another process; the live one takes scaled ones."""
    job, found = jobs[arch], elsewhere[arch]
    with torch.no_grad():
        acts = job.sae.encode(x[5120:] * job.scale)
        hat = job.sae.decode(acts) / job.scale
        norms = job.sae.W_dec.norm(dim=1)
    # topk's own activations hold the decoder's norm already.
    live = (acts if arch == "topk" else acts * norms) / job.scale
    assert np.abs(found["acts"] - live.numpy()).max() < 1e-3 * live.max()
    assert np.abs(found["hat"] - hat.numpy()).max() < 1e-3 * hat.abs().max()
    assert np.linalg.norm(found["decoder"], axis=1) == pytest.approx(1, abs=1e-5)
    assert (live > 0).sum() > 100
    assert np.abs(hat.numpy() - x[5120:].numpy()).mean() > 1e-3  # an imperfect answer


def test_batchtopk_threshold_gives_k(jobs, elsewhere, x):
    job, found = jobs["batchtopk"], elsewhere["batchtopk"]
    assert (found["acts"] > 0).sum(1).mean() == pytest.approx(K, rel=0.1)
    with torch.no_grad():
        _, pre = job.sae.encode_with_hidden_pre(x[5120:] * job.scale)
    edge = np.sort(pre.numpy().ravel())[-K * len(pre)]  # on the very positions it is asked for
    live = np.where(pre.numpy() > edge, pre.numpy(), 0) / job.scale
    near = np.abs(pre.numpy() - edge) < 0.05 * edge  # whose side the threshold's sample decides
    assert np.abs(found["acts"] - live)[~near].max() < 1e-3 * live.max()


@pytest.mark.parametrize("arch", ARCHS)
def test_training_helps(arch, jobs, x):
    held_out = x[5120:]
    spread = (held_out - held_out.mean(0)).square().sum()

    def fvu(job):
        sae = from_files(finished(job, x[:2048], {}), torch.device("cpu"))
        return float((sae(held_out) - held_out).square().sum() / spread)

    fresh = Job(plan(arch), jobs[arch].scale, x.mean(0).double(), torch.device("cpu"))
    assert fvu(jobs[arch]) < min(0.9, fvu(fresh))


def test_l0_falls_over_a_hundredfold_of_sparsity(x):
    weights = [0.05, 0.5, 5.0]
    for arch in ("standard", "jumprelu"):
        found = []
        for weight in weights:
            job = trained(x, plan(arch, sparsity=weight), passes=3)
            sae = from_files(finished(job, x[:2048], {}), torch.device("cpu"))
            found.append(float((sae.encode(x[5120:]) > 0).sum(1).float().mean()))
        assert found[0] > found[1] > found[2], (arch, found)
        if arch == "standard":  # jumprelu's threshold moves by the learning rate per step at most
            assert found[0] > 2 * found[2], found


def test_same_seed_same_weights(x, jobs):
    torch.manual_seed(99)  # the global state has no say
    again = trained(x, plan("topk"))
    other = trained(x, plan("topk", seed=1))
    first = finished(jobs["topk"], x[:10], {})
    assert finished(again, x[:10], {}) == first
    assert finished(other, x[:10], {}) != first


def test_the_configuration_has_the_same_bytes_in_every_process(jobs, x):
    """SAELens writes its entries in an order that hashes of strings decide."""
    config = json.loads(finished(jobs["topk"], x[:10], {"hook_name": "here"})["cfg.json"])
    assert config["metadata"]["hook_name"] == "here"
    for part in (config, config["metadata"]):
        assert list(part) == sorted(part)


def test_a_fixed_decoder_stays(x):
    job = trained(x, plan("topk", fixed_decoder=True))
    fresh = Job(job.plan, job.scale, x.mean(0).double(), torch.device("cpu"))
    assert torch.equal(job.sae.W_dec, fresh.sae.W_dec)
    assert not torch.equal(job.sae.W_enc, fresh.sae.W_enc)
    assert torch.allclose(job.sae.W_dec.norm(dim=1), torch.ones(WIDTH * D))
    spread = (x - x.mean(0)).square().sum()
    before, after = (
        float((from_files(finished(j, x[:9], {}), torch.device("cpu"))(x) - x).square().sum())
        for j in (fresh, job)
    )
    assert after < before < 1.1 * spread


def test_dead_in_training_is_recounted(x):
    """SAELens' count against one of all that fired in the last steps."""
    wanted = plan("topk", d_sae=400, lr=3e-2, tokens=5120)
    job = trained(x, wanted)
    shuffle = torch.randperm(5120, generator=torch.Generator().manual_seed(0))
    last = shuffle[-wanted.dead_steps * BATCH :]
    # Weights move on while it is counted: what fires with the last ones must not be called dead
    # by more than what they moved.
    with torch.no_grad():
        fires = (job.sae.encode(x[last] * job.scale) > 0).any(0)
    dead = job.trainer.dead_neurons
    assert 0 < float(dead.float().mean()) < 1
    assert float((dead & fires).float().mean()) < 0.05
    assert job.dead_fraction == float(dead.float().mean())


@pytest.mark.parametrize(("arch", "fixed"), [*((arch, False) for arch in ARCHS), ("topk", True)])
def test_saved_training_goes_on_as_if_nothing_had_happened(arch, fixed, x, tmp_path):
    """Stopped while the schedules of learning rate and penalty move, dead features counted."""
    wanted = plan(arch, tokens=10240, fixed_decoder=fixed)
    straight = trained(x, wanted, passes=2)
    for stop in (3, 71):  # in the warm-up, in the decay
        job = untrained(x, wanted)
        made = journal.Journal(tmp_path / str(stop), 3600)
        made.folder.mkdir()
        given = batches(job, x, 2)
        for i in made.stage("t").fold(range(stop), {"jobs": [job]}, training=True):
            job.step(given[i])
        made.flush()
        again, done = untrained(x, wanted), []
        made = journal.Journal(made.folder, 3600)
        for i in made.stage("t").fold(range(80), {"jobs": [again]}, training=True):
            done.append(i)
            again.step(given[i])
        assert done == list(range(stop, 80))
        for name, weight in straight.sae.state_dict().items():
            assert torch.equal(weight, again.sae.state_dict()[name]), name
        assert straight.log == again.log
        assert straight.dead_fraction == again.dead_fraction
        assert finished(straight, x[:2048], {}) == finished(again, x[:2048], {})


def test_all_that_saelens_keeps_is_kept(x, tmp_path):
    """Its own account of what its trainer needs to go on."""
    job = untrained(x, plan("jumprelu"))
    job.trainer.save_trainer_state(tmp_path)
    (file,) = tmp_path.glob("*.pt")
    theirs = set(torch.load(file)) - {"started_fine_tuning"}  # which nothing sets
    assert theirs == {*COUNTERS, "optimizer", "lr_scheduler", "coefficient_schedulers"}
    assert {"sae", "optimizer", "lr_scheduler", "l0"} <= set(job.state_dict()["parts"])


def test_a_loss_that_is_not_finite_stops(x):
    job = Job(plan(), 1.0, torch.zeros(D).double(), torch.device("cpu"))
    with pytest.raises(InterpError, match="--lr"):
        job.step(x[:BATCH] * 1e25)
