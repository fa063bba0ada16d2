"""Refuses circles between the modules of a crate: `python3 tools/check_module_cycles.py` names each, with the uses that close it.

A module is a file or a folder in a crate's `src`; it uses another if its code, tests apart, names `crate::other`. ARCHITECTURE.md has
drawings of the crates and of some crates' modules; the script fails where they are not those of the code, and `--draw` writes them
anew. A drawing leaves out an arrow where a longer way leads to the same module.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
DRAWN = ["crates", "ringspan", "ringspan-train"]


def names(paths: str) -> set[str]:
    """The first names of `crate::` paths: `{a::b, c}` are a and c."""
    first, depth, start = set(), 0, 0
    for at, char in enumerate(paths + ","):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            first.add(re.split(r"::|\s", paths[start:at].strip())[0])
            start = at + 1
    return first


def uses(src: Path) -> dict[str, set[str]]:
    """The modules that each module of a crate uses."""
    graph: dict[str, set[str]] = {}
    for file in src.rglob("*.rs"):
        parts = file.relative_to(src).with_suffix("").parts
        if parts[-1] in ("test", "tests") or "test" in parts or "tests" in parts:
            continue
        # A module of tests in the file is its last item; one in a file of its own is only named here.
        code = re.split(r"#\[cfg\(test\)\]\n(?:pub(?:\([^)]*\))? )?mod \w+ \{", re.sub(r"//.*", "", file.read_text()))[0]
        used = graph.setdefault(parts[0], set())
        for path in re.finditer(r"\bcrate::(\w+|\{[^;]*\})", code):
            used |= names(path[1][1:-1]) if path[1].startswith("{") else {path[1]}
    return {module: (used & graph.keys()) - {module} for module, used in graph.items()}


def reachable(graph: dict[str, set[str]], module: str) -> set[str]:
    """The modules that a module uses, directly or through others."""
    found, open_ = set(), list(graph[module])
    while open_:
        other = open_.pop()
        if other not in found:
            found.add(other)
            open_ += graph[other]
    return found


def circles(graph: dict[str, set[str]]) -> list[str]:
    """A line for each module that uses itself through others."""
    reach = {module: reachable(graph, module) for module in graph}
    closes = {module: sorted(other for other in graph[module] if module in reach[other]) for module in graph}
    return [f"{module} uses {', '.join(others)}" for module, others in sorted(closes.items()) if others]


def crates() -> dict[str, set[str]]:
    """The crates of the workspace that each of them needs."""
    manifests = {path.parent.name: tomllib.loads(path.read_text()) for path in ROOT.glob("crates/*/Cargo.toml")}
    return {name: manifest["dependencies"].keys() & manifests.keys() for name, manifest in manifests.items()}


def drawing(graph: dict[str, set[str]]) -> str:
    """A graph without circles in Mermaid's language, from those who use to those who are used."""
    lines = ["```mermaid", "graph TD"]
    for module in sorted(graph):
        longer = {far for near in graph[module] for far in reachable(graph, near)}
        lines += [f"    {module} --> {other}" for other in sorted(graph[module] - longer)]
    return "\n".join([*lines, "```"])


def drawn(text: str) -> str:
    """ARCHITECTURE.md with its drawings as the code has them."""
    missing = [name for name in DRAWN if f"<!-- drawing of {name} -->" not in text]
    if missing:
        sys.exit(f"ARCHITECTURE.md has no drawing of {', '.join(missing)}")

    def anew(match: re.Match) -> str:
        name = match[2]
        graph = crates() if name == "crates" else uses(ROOT / "crates" / name / "src")
        return f"{match[1]}\n{drawing(graph)}\n"

    return re.sub(r"(<!-- drawing of ([\w-]+) -->)\n```.*?```\n", anew, text, flags=re.S)


def main() -> None:
    architecture = ROOT / "ARCHITECTURE.md"
    text = architecture.read_text()
    if sys.argv[1:] == ["--draw"]:
        architecture.write_text(drawn(text))
    elif drawn(text) != text:
        sys.exit("the drawings in ARCHITECTURE.md are not those of the code: tools/check_module_cycles.py --draw makes them anew")
    found = 0
    for crate in sorted(ROOT.glob("crates/*")):
        graph = uses(crate / "src")
        lines = circles(graph)
        found += len(lines)
        print(f"{crate.name}: {len(graph)} modules, {'no circle' if not lines else 'a circle'}")
        print("".join(f"  {line}\n" for line in lines), end="")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
