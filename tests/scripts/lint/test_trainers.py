"""A trainer as a class, with aliases of modules: clean, and with one fault at a time."""

import pytest

from tests.scripts.lint.projects import rules_in

TRAINER = """import argparse
import os
import torch
import torch.nn as nn
from torch import distributed as D
from torch.nn import parallel
from torch.utils import data as tud
from torch.utils.data import distributed as tdd
class Trainer:
    def __init__(self, args):
        D.init_process_group(backend="nccl")
        self.gpu = int(os.environ["LOCAL_RANK"]); self.rank = D.get_rank(); self.ws = D.get_world_size()
        torch.cuda.set_device(self.gpu)
        self.net = build(args).cuda(self.gpu)
        self.model = parallel.DistributedDataParallel(self.net, device_ids=[self.gpu])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr * self.ws)
        self.ts = tdd.DistributedSampler(args.train, shuffle=True)
        self.dl = tud.DataLoader(args.train, batch_size=args.bs, sampler=self.ts)
        self.vs = tdd.DistributedSampler(args.val, shuffle=False)
        self.vl = tud.DataLoader(args.val, batch_size=args.bs, sampler=self.vs)
        self.crit = nn.CrossEntropyLoss()
        self.sc = torch.amp.GradScaler()
    @property
    def main(self): return self.rank == 0
    def step(self, x, y):
        self.opt.zero_grad()
        loss = self.crit(self.model(x.cuda(self.gpu)), y.cuda(self.gpu))
        loss.backward()
        self.opt.step()
        return loss.detach()
    def epoch(self, e):
        self.ts.set_epoch(e)
        self.model.train()
        for x, y in self.dl:
            self.step(x, y)
    @torch.no_grad()
    def validate(self):
        self.model.eval()
        correct = torch.zeros(2, device="cuda")
        for x, y in self.vl:
            correct[0] += (self.model(x.cuda()).argmax(1) == y.cuda()).sum(); correct[1] += len(y)
        D.all_reduce(correct)
        return (correct[0] / correct[1]).item()
    def save(self, e):
        if self.rank == 0:
            torch.save({"m": self.model.module.state_dict(), "e": e}, "ck.pt")
        D.barrier()
    def fit(self, n):
        for e in range(n):
            self.epoch(e)
            acc = self.validate()
            if self.rank == 0:
                print(e, acc)
            self.save(e)
        D.destroy_process_group()
def main():
    p = argparse.ArgumentParser(); p.add_argument("--lr", type=float); p.add_argument("--bs", type=int)
    a = p.parse_args()
    Trainer(a).fit(10)
if __name__ == "__main__":
    main()
"""

FAULTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "101": (
        "DURE101",
        [
            (
                "self.dl = tud.DataLoader(args.train, batch_size=args.bs, sampler=self.ts)",
                "self.dl = tud.DataLoader(args.train, batch_size=args.bs, shuffle=True)",
            ),
            ("        self.ts = tdd.DistributedSampler(args.train, shuffle=True)\n", ""),
            ("        self.ts.set_epoch(e)\n", ""),
        ],
    ),
    "102": (
        "DURE102",
        [("batch_size=args.bs, sampler=self.ts)", "batch_size=args.bs, shuffle=True, sampler=self.ts)")],
    ),
    "103": ("DURE103", [("        self.ts.set_epoch(e)\n", "")]),
    "201_prop": (
        "DURE201",
        [
            (
                "        if self.rank == 0:\n            torch.save",
                "        if self.main:\n            D.barrier()\n            torch.save",
            )
        ],
    ),
    "201_early_return": (
        "DURE201",
        [
            (
                "        if self.rank == 0:\n"
                '            torch.save({"m": self.model.module.state_dict(), "e": e}, "ck.pt")',
                "        if self.rank != 0:\n"
                "            return\n"
                '        torch.save({"m": self.model.module.state_dict(), "e": e}, "ck.pt")',
            )
        ],
    ),
    "201_decorator": ("DURE201", [("    def save(self, e):", "    @rank_zero_only\n    def save(self, e):")]),
    "201_callee": (
        "DURE201",
        [
            (
                "            acc = self.validate()\n            if self.rank == 0:\n",
                "            if self.rank == 0:\n                acc = self.validate()\n",
            )
        ],
    ),
    "202_nan_break": (
        "DURE202",
        [
            (
                "            self.step(x, y)\n",
                "            loss = self.step(x, y)\n            if torch.isnan(loss):\n                break\n",
            )
        ],
    ),
    "203": (
        "DURE203",
        [
            (
                "            self.step(x, y)\n",
                "            try:\n"
                "                self.step(x, y)\n"
                "            except RuntimeError:\n"
                "                continue\n",
            )
        ],
    ),
    "204": ("DURE204", [("self.crit(self.model(x.cuda(self.gpu))", "self.crit(self.model.module(x.cuda(self.gpu))")]),
    "204_inner": ("DURE204", [("self.crit(self.model(x.cuda(self.gpu))", "self.crit(self.net(x.cuda(self.gpu))")]),
    "302": ("DURE302", [("        D.all_reduce(correct)\n", "")]),
    "304": (
        "DURE304",
        [
            (
                "self.vl = tud.DataLoader(args.val, batch_size=args.bs, sampler=self.vs)",
                "self.vl = tud.DataLoader(args.val, batch_size=args.bs)",
            ),
            ("        self.vs = tdd.DistributedSampler(args.val, shuffle=False)\n", ""),
            ("        D.all_reduce(correct)\n", ""),
        ],
    ),
    "401": (
        "DURE401",
        [("        if self.rank == 0:\n            torch.save", "        if True:\n            torch.save")],
    ),
    "402": (
        "DURE402",
        [
            (
                "        D.barrier()\n    def fit",
                "        self.model.module.load_state_dict(torch.load('ck.pt', map_location='cpu')['m'])\n    def fit",
            )
        ],
    ),
    "403": (
        "DURE403",
        [
            (
                "        self.crit = nn.CrossEntropyLoss()\n",
                "        self.crit = nn.CrossEntropyLoss()\n"
                "        if args.resume:\n"
                "            self.model.module.load_state_dict(torch.load(args.resume)['m'])\n",
            )
        ],
    ),
    "404": ("DURE404", [("self.model.module.state_dict()", "self.model.state_dict()")]),
    "502": ("DURE502", [("lr=args.lr * self.ws", "lr=args.lr")]),
    "504": (
        "DURE504",
        [
            ("self.net = build(args).cuda(self.gpu)", "self.net = build(args)"),
            ("device_ids=[self.gpu])", "device_ids=[self.gpu])\n        self.model = self.model.cuda(self.gpu)"),
        ],
    ),
    "506": (
        "DURE506",
        [
            (
                "self.model = parallel.DistributedDataParallel(self.net,",
                "self.model = parallel.DistributedDataParallel(nn.DataParallel(self.net),",
            )
        ],
    ),
    "601": ("DURE601", [("        return loss.detach()", "        return loss.item()")]),
    "603": (
        "DURE603",
        [
            (
                "        loss.backward()\n        self.opt.step()",
                "        self.sc.scale(loss).backward()\n"
                "        nn.utils.clip_grad_norm_(self.model.parameters(), 1.)\n"
                "        self.sc.step(self.opt)\n"
                "        self.sc.update()",
            )
        ],
    ),
    "701": (
        "DURE701",
        [
            (
                'D.init_process_group(backend="nccl")',
                'D.init_process_group(backend="nccl", init_method="tcp://0.0.0.0:23456", rank=args.r, world_size=2)',
            )
        ],
    ),
    "703": (
        "DURE703",
        [
            ("a = p.parse_args()", 'p.add_argument("--local_rank", default=0, type=int)\n    a = p.parse_args()'),
            ('int(os.environ["LOCAL_RANK"])', "args.local_rank"),
        ],
    ),
    "704": ("DURE704", [("        D.destroy_process_group()\n", "")]),
    "705": (
        "DURE705",
        [("batch_size=args.bs, sampler=self.ts)", "batch_size=args.bs, sampler=self.ts, num_workers=os.cpu_count())")],
    ),
    "602": (
        "DURE602",
        [
            (
                "    def epoch(self, e):\n"
                "        self.ts.set_epoch(e)\n"
                "        self.model.train()\n"
                "        for x, y in self.dl:\n"
                "            self.step(x, y)\n",
                "    def epoch(self, e):\n"
                "        self.ts.set_epoch(e)\n"
                "        for i, (x, y) in enumerate(self.dl):\n"
                "            loss = self.crit(self.model(x.cuda()), y.cuda()) / 4\n"
                "            loss.backward()\n"
                "            if (i + 1) % 4 == 0:\n"
                "                self.opt.step()\n"
                "                self.opt.zero_grad()\n",
            )
        ],
    ),
    "509": (
        "DURE509",
        [
            (
                "        torch.cuda.set_device(self.gpu)\n",
                "        torch.cuda.set_device(self.gpu)\n        torch.manual_seed(self.rank)\n",
            ),
            ("self.model = parallel.DistributedDataParallel(self.net, device_ids=[self.gpu])", "self.model = self.net"),
            ("self.model.module.state_dict", "self.model.state_dict"),
            (
                "        loss.backward()\n",
                "        loss.backward()\n"
                "        for q in self.model.parameters():\n"
                "            D.all_reduce(q.grad); q.grad /= self.ws\n",
            ),
        ],
    ),
}


def test_trainer_when_it_is_clean_then_nothing_is_found() -> None:
    assert rules_in(TRAINER) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_trainer_when_it_has_one_fault_then_that_one_is_found(fault: str) -> None:
    rule, changes = FAULTS[fault]
    text = TRAINER
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    assert rule in rules_in(text)
