"""Refuses circles between the modules of a crate: `python3 tools/check_module_cycles.py` names each, with the uses that close it.

A module is a file or a folder in a crate's `src`; it uses another if its code, tests apart, names `crate::other`.
"""

import re
import sys
from pathlib import Path


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


def main() -> None:
    found = 0
    for crate in sorted(Path(__file__).parent.parent.glob("crates/*")):
        graph = uses(crate / "src")
        lines = circles(graph)
        found += len(lines)
        print(f"{crate.name}: {len(graph)} modules, {'no circle' if not lines else 'a circle'}")
        print("".join(f"  {line}\n" for line in lines), end="")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
