//! Draws meshes as tables of ranks, and groups as short lists.

use anyhow::Result;
use ringspan::mesh::{Mesh, Topology};
use std::fmt::Write;

/// Upper limit on a table's rows; further rows are only counted.
const SHOWN: usize = 16;

/// Upper limit on the characters that an axis's groups take; further groups are only counted.
const WIDTH: usize = 80;

/// Upper limit on a table's columns, since a wider one wraps in every terminal.
const COLUMNS: usize = 64;

/// Draws a table of the ranks for each way to read them as a mesh, then the groups of every axis.
pub(super) fn draw(topology: &Topology) -> Result<String> {
    let mut out = String::new();
    for mesh in topology.meshes() {
        writeln!(out, "{mesh}")?;
        table(&mut out, mesh)?;
        writeln!(out)?;
    }
    let width = topology.names().map(str::len).max().unwrap_or(0);
    for name in topology.names() {
        let groups = topology.groups(name)?;
        if groups.len() == topology.world() {
            writeln!(out, "{name:width$}  each rank alone")?;
            continue;
        }
        write!(out, "{name:width$}")?;
        let mut left = WIDTH;
        for (index, ranks) in groups.iter().enumerate() {
            let text = list(ranks);
            if index > 0 && text.len() + 2 > left {
                write!(out, "  and {} more", groups.len() - index)?;
                break;
            }
            left = left.saturating_sub(text.len() + 2);
            write!(out, "  {text}")?;
        }
        writeln!(out)?;
    }
    Ok(out)
}

/// Draws one table: the two innermost axes across, the others down; axes of size 1 are left out.
fn table(out: &mut String, mesh: &Mesh) -> Result<()> {
    let axes: Vec<(&str, usize)> = mesh.axes().filter(|(_, size)| *size > 1).collect();
    let (down, across) = axes.split_at(axes.len().saturating_sub(2));
    let columns: usize = across.iter().map(|(_, size)| size).product();
    let rows = mesh.world() / columns;
    if columns > COLUMNS {
        writeln!(out, "  {rows} rows of {columns} ranks: too wide to draw")?;
        return Ok(());
    }
    let label = |axes: &[(&str, usize)], mut rest: usize| {
        let mut words = Vec::new();
        for (name, size) in axes.iter().rev() {
            words.push(format!("{name} {}", rest % size));
            rest /= size;
        }
        words.reverse();
        words.join(", ")
    };
    let left = (0..rows.min(SHOWN)).map(|row| label(down, row).len()).max().unwrap_or(0);
    let cell = across.last().map_or(1, |(name, size)| name.len() + 1 + (size - 1).to_string().len());
    let cell = cell.max((mesh.world() - 1).to_string().len()) + 2;
    if let [(outer, size), (_, inner)] = across {
        let heads: Vec<String> = (0..*size).map(|at| format!("{:>1$}", format!("{outer} {at}"), cell)).collect();
        let line = heads.join(&" ".repeat(cell * (inner - 1)));
        writeln!(out, "  {:left$}{line}", "")?;
    }
    if let Some((name, size)) = across.last() {
        let heads: String = (0..columns).map(|at| format!("{:>cell$}", format!("{name} {}", at % size))).collect();
        writeln!(out, "  {:left$}{heads}", "")?;
    }
    for row in 0..rows.min(SHOWN) {
        let ranks: String = (0..columns).map(|column| format!("{:>cell$}", row * columns + column)).collect();
        writeln!(out, "  {:left$}{ranks}", label(down, row))?;
    }
    if rows > SHOWN {
        writeln!(out, "  and {} more rows", rows - SHOWN)?;
    }
    Ok(())
}

/// Ranks written as `3`, `0-7`, `0,4`, or `0,4..28` if at least four follow each other in equal steps.
fn list(ranks: &[usize]) -> String {
    let equal = |step: usize| ranks.windows(2).all(|pair| pair[1] == pair[0] + step);
    match ranks {
        [first, .., last] if equal(1) => format!("{first}-{last}"),
        [first, second, _, _, .., last] if *second > *first && equal(second - first) => {
            format!("{first},{second}..{last}")
        }
        _ => ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringspan::mesh::{Experts, Grid, Training};

    #[test]
    fn a_mesh_is_a_table_with_the_innermost_axes_across() {
        let cp = Grid::new(2, 1);
        let sizes =
            Training { dp_shard: 2, cp, tp: 2, experts: Some(Experts { ep: 4, moe_dp: 1 }), ..Training::default() };
        let drawn = draw(&sizes.topology().expect("valid")).expect("text");
        let expected = "\
pp 1 x dp_replicate 1 x dp_shard 2 x ring 2 x ulysses 1 x tp 2 = 8 ranks
            ring 0      ring 1
              tp 0  tp 1  tp 0  tp 1
  dp_shard 0     0     1     2     3
  dp_shard 1     4     5     6     7

pp 1 x moe_dp 1 x moe_ep 4 x moe_tp 2 = 8 ranks
    moe_ep 0            moe_ep 1            moe_ep 2            moe_ep 3
    moe_tp 0  moe_tp 1  moe_tp 0  moe_tp 1  moe_tp 0  moe_tp 1  moe_tp 0  moe_tp 1
           0         1         2         3         4         5         6         7

pp            each rank alone
dp_replicate  each rank alone
dp_shard      0,4  1,5  2,6  3,7
cp            0,2  1,3  4,6  5,7
ring          0,2  1,3  4,6  5,7
ulysses       each rank alone
tp            0-1  2-3  4-5  6-7
dp            0,4  1,5  2,6  3,7
dp_shard_cp   0,2,4,6  1,3,5,7
dp_cp         0,2,4,6  1,3,5,7
moe_dp        each rank alone
moe_ep        0,2,4,6  1,3,5,7
moe_tp        0-1  2-3  4-5  6-7
";
        assert_eq!(drawn, expected);
    }

    #[test]
    fn ranks_with_equal_steps_are_written_short() {
        assert_eq!([list(&[3]), list(&[4, 5]), list(&[0, 1, 2, 3])], ["3", "4-5", "0-3"]);
        assert_eq!([list(&[0, 4]), list(&[0, 4, 8]), list(&[0, 4, 8, 12, 16])], ["0,4", "0,4,8", "0,4..16"]);
        assert_eq!([list(&[0, 4, 8, 13]), list(&[0, 2, 1, 3])], ["0,4,8,13", "0,2,1,3"]);
    }
}
