"""Refuses circles between the modules of a crate: `python3 tools/check_module_cycles.py` names each, with the uses that close it.

Siblings are the modules in one folder of a crate's `src`, at any depth; a folder stands for all files in it. A module uses a sibling
if its code, tests apart, names something of it by a path that begins with `crate`, `super` or `self`, also where a module above
re-exports that thing. No sibling may use itself through others. A module and the ones inside it may use each other: they are parts
of one thing, whose inner parts nobody else needs to know.

ARCHITECTURE.md has a drawing of the crates, and docs/modules.md one of the modules of each that has several (`<!-- drawing of ringspan -->`,
or of a folder, `<!-- drawing of ringspan/kernel -->`); the script fails where they are not those of the code, and `--draw` writes them
anew. A drawing leaves out an arrow where a longer way leads to the same module.
"""

import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent

Module = tuple[str, ...]  # The names from the crate's root, which is ().
Graph = dict[str, set[str]]  # The siblings that each module of a folder uses.


def use_paths(tree: str) -> list[tuple[list[str], str]]:
    """The paths of a `use` declaration, each with the name that it has in the module: `a::{b, c as d}` are a::b and a::c."""
    group = re.fullmatch(r"([^{]*)\{(.*)\}", tree.strip(), re.S)
    if not group:
        path, _, alias = " ".join(tree.split()).partition(" as ")
        segments = path.split("::")
        return [(segments, alias or segments[-1])]
    head, paths = [segment for segment in group[1].strip().split("::") if segment], []
    depth, start, inner = 0, 0, group[2] + ","
    for at, char in enumerate(inner):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            if inner[start:at].strip():
                paths += [(head + path, head[-1] if name == "self" else name) for path, name in use_paths(inner[start:at])]
            start = at + 1
    return paths


class Crate:
    """The modules of a crate, with the paths that each names and the names that each imports or re-exports."""

    def __init__(self, src: Path):
        self.named: dict[Module, list[list[str]]] = defaultdict(list)
        self.imported: dict[Module, dict[str, list[str]]] = defaultdict(dict)
        for file in src.rglob("*.rs"):
            module = file.relative_to(src).with_suffix("").parts
            if {"test", "tests"} & set(module):
                continue
            self.read(module[:-1] if module[-1] in ("lib", "main", "mod") else module, file.read_text())

    def read(self, module: Module, text: str) -> None:
        # A module of tests in the file is its last item; one in a file of its own is only named here.
        code = re.split(r"#\[cfg\(test\)\]\n(?:pub(?:\([^)]*\))? )?mod \w+ \{", re.sub(r"//.*", "", text))[0]
        declaration = r"\buse\s+([^;]+);"
        for use in re.findall(declaration, code):
            for path, name in use_paths(use):
                self.named[module].append(path)
                self.imported[module][name] = path
        rest = re.sub(declaration, "", code)
        self.named[module] += [path.split("::") for path in re.findall(r"\b(?:crate|super|self)(?:::\w+)+", rest)]

    def module_of(self, path: list[str], at: Module, imports: int = 0) -> Module | None:
        """The module that defines what a path in module `at` names, after following `imports`; none if it is in another crate."""
        if path[0] not in ("crate", "super", "self") and (*at, path[0]) not in self.named:
            return None
        here = at
        for index, name in enumerate(path):
            if name == "crate":
                here = ()
            elif name == "super":
                here = here[:-1]
            elif (*here, name) in self.named:
                here = (*here, name)
            elif name != "self":
                elsewhere = self.imported[here].get(name)
                if not elsewhere or imports > 9:
                    return here
                return self.module_of(elsewhere + path[index + 1 :], here, imports + 1) or here
        return here

    def folders(self) -> dict[Module, Graph]:
        """For each folder, which of its modules use which."""
        graphs: dict[Module, Graph] = {}
        for module in list(self.named):
            for depth, name in enumerate(module):
                graphs.setdefault(module[:depth], {}).setdefault(name, set())
        for module, paths in list(self.named.items()):
            for path in paths:
                used = self.module_of(path, module)
                pairs = zip(module, used or ())
                depth = next((depth for depth, (user, name) in enumerate(pairs) if user != name), None)
                if used and depth is not None:
                    graphs[module[:depth]][module[depth]].add(used[depth])
        return graphs


def modules(crate: str) -> dict[Module, Graph]:
    return Crate(ROOT / "crates" / crate / "src").folders()


def reachable(graph: Graph, module: str) -> set[str]:
    """The modules that a module uses, directly or through others."""
    found, open_ = set(), list(graph[module])
    while open_:
        other = open_.pop()
        if other not in found:
            found.add(other)
            open_ += graph[other]
    return found


def circles(graph: Graph) -> list[str]:
    """A line for each module that uses itself through others."""
    reach = {module: reachable(graph, module) for module in graph}
    closes = {module: sorted(other for other in graph[module] if module in reach[other]) for module in graph}
    return [f"{module} uses {', '.join(others)}" for module, others in sorted(closes.items()) if others]


def crates() -> Graph:
    """The crates of the workspace that each of them needs."""
    manifests = {path.parent.name: tomllib.loads(path.read_text()) for path in ROOT.glob("crates/*/Cargo.toml")}
    return {name: manifest["dependencies"].keys() & manifests.keys() for name, manifest in manifests.items()}


def drawing(graph: Graph) -> str:
    """A graph without circles in Mermaid's language, with an arrow from each module to those that it uses."""
    lines = ["```mermaid", "graph TD"]
    for module in sorted(graph):
        longer = {far for near in graph[module] for far in reachable(graph, near)}
        lines += [f"    {module} --> {other}" for other in sorted(graph[module] - longer)]
    return "\n".join([*lines, "```"])


def drawn(text: str) -> str:
    """A page with its drawings as the code has them."""

    def anew(match: re.Match) -> str:
        crate, *folder = match[2].split("/")
        graph = crates() if crate == "crates" else modules(crate)[tuple(folder)]
        return f"{match[1]}\n{drawing(graph)}\n"

    return re.sub(r"(<!-- drawing of ([\w/-]+) -->)\n(?:```.*?```\n)?", anew, text, flags=re.S)


def main() -> None:
    pages = {ROOT / name: (ROOT / name).read_text() for name in ("ARCHITECTURE.md", "docs/modules.md")}
    several = [crate for crate in sorted(crates()) if any(modules(crate)[()].values())]
    missing = [name for name in ["crates", *several] if not any(f"<!-- drawing of {name} -->" in text for text in pages.values())]
    if missing:
        sys.exit(f"no page has a drawing of {', '.join(missing)}")
    for page, text in pages.items():
        if sys.argv[1:] == ["--draw"]:
            page.write_text(drawn(text))
        elif drawn(text) != text:
            sys.exit(f"the drawings in {page.name} are not those of the code: tools/check_module_cycles.py --draw makes them anew")
    refused = False
    for crate in sorted(crates()):
        folders = modules(crate)
        found = {"/".join((crate, *folder)): lines for folder, graph in folders.items() if (lines := circles(graph))}
        refused |= bool(found)
        print(f"{crate}: {sum(map(len, folders.values()))} modules, {'no circle' if not found else 'circles'}")
        for name, lines in sorted(found.items()):
            print(f"  in {name}:")
            print("".join(f"    {line}\n" for line in lines), end="")
    sys.exit(refused)


if __name__ == "__main__":
    main()
