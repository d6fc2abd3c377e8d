"""What the sources must not do, looked for in their syntax trees: SECURITY.md's promises, kept.

`ALLOWED` holds the exceptions, each with its reason; one that is no longer needed fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for folder in ("verl", "benchmarks", "examples") for p in (ROOT / folder).rglob("*.py"))

ALLOWED: dict[tuple[str, str], str] = {
    ("eval", "verl/compat/paths.py"): (
        "what runpy asks a loader for: two lines of program, made of module names from our own table"
    ),
    ("eval", "verl/data/load_object.py"): (
        "imports a user's Python file, as importlib does, from the bytes that every process of a run uses"
    ),
    ("unpickling", "verl/engine/training/fsdp/optimizer_state.py"): (
        "an Unpickler that can name nothing but torch's own list-of-tensors classes; in place of torch's pickle.load"
    ),
    ("unpickling", "verl/engine/rollout/sglang/arguments.py"): (
        "only writes the form in which SGLang takes tensors on other nodes, which it reads by an unpickler of its own"
    ),
    ("shell", "verl/tracking/profiler.py"): "the command of global_profiler.finish_hook_cmd, which the user writes",
    ("process-pickle", "verl/data/dataset.py"): (
        "a process pool of the standard library: children of this process, on pipes that nobody else can open"
    ),
    ("process-pickle", "verl/engine/rollout/hosted.py"): "starts the resource tracker early; nothing is sent",
    ("process-pickle", "verl/engine/rollout/vllm/launch.py"): (
        "starts the resource tracker early, and asks whether this process is being spawned; nothing is sent"
    ),
    ("process-pickle", "verl/platform/cuda.py"): (
        "torch's function that rebuilds a tensor from a device handle; its arguments travel as JSON"
    ),
    ("process-pickle", "verl/reward/judge_server.py"): (
        "a small HTTP server on the loopback: what comes is read as JSON"
    ),
    ("process-pickle", "verl/report/serve.py"): (
        "a small HTTP server on the loopback: only the path of a GET is read, and its token is checked first"
    ),
    ("process-pickle", "benchmarks/weight_sync.py"): "two processes of the benchmark itself",
    ("process-pickle", "benchmarks/weight_sync_ranks.py"): "ranks and a receiver of the benchmark itself",
}

PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
PROCESSES = {
    "ProcessPoolExecutor",
    "multiprocessing",
    "torch.multiprocessing",
    "xmlrpc",
    "socketserver",
    "http.server",
}
OBJECTS = {
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
ANYWHERE = {"", "0.0.0.0", "::", "*"}
BINDING = {
    "bind",
    "create_server",
    "start_server",
    "listen",
    "HTTPServer",
    "ThreadingHTTPServer",
    "run_server",
}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression of names; "" for others (`f().b` is ".b")."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else ...


def in_modules(name: str, modules: set[str]) -> bool:
    return any(name == m or name.startswith(f"{m}.") for m in modules)


def found_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(rule, line) of everything that breaks a rule."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _import(node)
        elif isinstance(node, ast.Call):
            yield from ((rule, node.lineno) for rule in _call(node))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            args = [*node.args.posonlyargs, *node.args.args]
            pairs = [*zip(reversed(args), reversed(node.args.defaults), strict=False)]
            pairs += list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
            for argument, default in pairs:
                if argument.arg == "trust_remote_code" and constant(default) not in (False, None, ...):
                    yield "remote-code", node.lineno
        elif isinstance(node, ast.AnnAssign) and dotted(node.target).endswith("trust_remote_code"):
            if constant(node.value) not in (False, None, ...):
                yield "remote-code", node.lineno
        elif isinstance(node, ast.Constant) and node.value == "0.0.0.0":
            yield "bind", node.lineno


def _import(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        names += [alias.name for alias in node.names]
    if any(in_modules(name, PICKLES) for name in names):
        yield "unpickling", node.lineno
    if any(in_modules(name, PROCESSES) for name in names):
        yield "process-pickle", node.lineno
    if isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in names:
        yield "torch-load", node.lineno


def _call(node: ast.Call) -> Iterator[str]:
    name = dotted(node.func)
    last = name.rsplit(".", 1)[-1]
    keywords = {k.arg: k.value for k in node.keywords}
    if name in ("eval", "exec", "compile", "builtins.eval", "builtins.exec", "__import__"):
        yield "eval"
    if last == "load" and name.split(".")[0] == "torch" and constant(keywords.get("weights_only")) is not True:
        yield "torch-load"
    if name in ("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"):
        yield "torch-load"
    if last in OBJECTS or last == "read_pickle":
        yield "unpickling"
    if constant(keywords.get("allow_pickle")) is True:
        yield "unpickling"
    if last == "FileSystemReader" or (
        last in ("load", "load_state_dict") and name.split(".")[0] in ("dcp",) and "storage_reader" not in keywords
    ):
        yield "checkpoint-pickle"
    if last in ("unsafe_load", "full_load", "unsafe_load_all") and "yaml" in name:
        yield "yaml"
    if name in ("yaml.load", "yaml.load_all"):
        loader = keywords.get("Loader") or (node.args[1] if len(node.args) > 1 else None)
        if loader is None or dotted(loader).rsplit(".", 1)[-1] not in (
            "SafeLoader",
            "CSafeLoader",
            "Loader",
            "loader",
        ):
            yield "yaml"
        if loader is not None and dotted(loader) == "yaml.Loader":
            yield "yaml"
    if constant(keywords.get("shell")) not in (False, ...) or name in (
        "os.system",
        "os.popen",
        "subprocess.getoutput",
    ):
        yield "shell"
    if constant(keywords.get("trust_remote_code")) not in (False, None, ...):
        yield "remote-code"
    if constant(keywords.get("verify")) is False or last == "_create_unverified_context":
        yield "tls"
    if last == "mktemp" and "tempfile" in name:
        yield "temporary"
    if name == "os.open" and len(node.args) == 2 and "O_CREAT" in ast.dump(node.args[1]) and "mode" not in keywords:
        yield "permissions"
    modes = [a for a in node.args if last == "chmod"] + [keywords[k] for k in ("mode",) if k in keywords]
    for mode in map(constant, modes):
        if isinstance(mode, int) and not isinstance(mode, bool) and mode & 0o022:
            yield "permissions"
    if last in BINDING:
        for argument in (*node.args, *(v for k, v in keywords.items() if k in ("host", "address", "addr"))):
            host = argument.elts[0] if isinstance(argument, ast.Tuple) and argument.elts else argument
            if constant(host) in ANYWHERE:
                yield "bind"


def test_the_rules_find_what_they_are_for() -> None:
    bad = {
        "unpickling": [
            "import pickle",
            "from joblib import load",
            "import cloudpickle as c",
            "np.load(f, allow_pickle=True)",
            "dist.all_gather_object(a, b)",
            "pd.read_pickle(f)",
        ],
        "process-pickle": ["from multiprocessing import Queue", "import torch.multiprocessing as mp"],
        "torch-load": [
            "torch.load(f)",
            "torch.load(f, weights_only=False)",
            "from torch import load",
            "torch.jit.load(f)",
        ],
        "checkpoint-pickle": ["dcp.load(a, checkpoint_id=b)", "dcp.FileSystemReader(a)"],
        "eval": ["eval(x)", "exec(x)", "__import__(x)", "compile(x, 'a', 'exec')"],
        "yaml": [
            "yaml.load(x)",
            "yaml.load(x, Loader=yaml.Loader)",
            "yaml.unsafe_load(x)",
            "yaml.load(x, yaml.FullLoader)",
        ],
        "shell": ["subprocess.run(x, shell=True)", "os.system(x)"],
        "remote-code": [
            "f(trust_remote_code=True)",
            "def f(trust_remote_code=True): ...",
            "def f(*, a, trust_remote_code: bool = True): ...",
            "class A:\n    trust_remote_code: bool = True",
        ],
        "bind": [
            "s.bind(('', 0))",
            "s.bind(('0.0.0.0', 1))",
            "start_server(f, host='::')",
            "HOST = '0.0.0.0'",
        ],
        "temporary": ["tempfile.mktemp()"],
        "permissions": ["os.open(p, os.O_CREAT | os.O_RDWR)", "p.chmod(0o777)", "os.mkdir(p, mode=0o777)"],
        "tls": ["requests.get(u, verify=False)"],
    }
    for rule, sources in bad.items():
        for source in sources:
            assert rule in {r for r, _ in found_in(ast.parse(source))}, source
    good = [
        "torch.load(f, weights_only=True)",
        "yaml.load(x, Loader=yaml.SafeLoader)",
        "s.bind(('127.0.0.1', 0))",
        "s.bind((address, 0))",
        "model.eval()",
        "re.compile('x')",
        "os.open(p, os.O_CREAT, 0o600)",
        "f(trust_remote_code=model.trust_remote_code)",
        "def f(trust_remote_code=False): ...",
        "dcp.load(a, storage_reader=StateReader(b))",
        "json.load(f)",
        "np.load(f)",
        "subprocess.run([a, b])",
        "p.chmod(0o644)",
    ]
    for source in good:
        assert not list(found_in(ast.parse(source))), source


def everything() -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for path in SOURCES:
        for rule, line in found_in(ast.parse(path.read_text("utf-8"))):
            found.setdefault((rule, path.relative_to(ROOT).as_posix()), []).append(line)
    return found


def test_nothing_breaks_a_rule_without_a_reason() -> None:
    found = everything()
    new = [f"{path}:{lines}: {rule}" for (rule, path), lines in found.items() if (rule, path) not in ALLOWED]
    assert not new, "forbidden (see SECURITY.md), or to be added to ALLOWED with a reason:\n" + "\n".join(new)
    assert not ALLOWED.keys() - found.keys(), "no longer needed"


@pytest.mark.parametrize("entry", ["ppo", "sft", "generation", "eval"])
def test_no_key_runs_code_of_a_model_or_opens_a_port_by_default(entry: str) -> None:
    from verl.config import load

    tree = load([], entry).to_dict()
    seen = []

    def walk(node: object, where: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, f"{where}.{key}")
        elif where.endswith("trust_remote_code"):
            seen.append(where)
            assert node is False, where
        elif isinstance(node, str):
            assert node not in ("0.0.0.0", "::"), where

    walk(tree, "")
    assert seen or entry == "eval"
