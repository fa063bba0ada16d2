//! The README's table of what works with what is what the code does: every cell is computed and compared.

mod support;

use ringspan::{Documents, LayoutKind, Mask, Strategy};
use support::{Problem, relative_l2};

const COLUMNS: [(&str, Strategy, (usize, usize)); 4] = [
    ("ring", Strategy::Ring, (4, 1)),
    ("all-gather", Strategy::AllGather, (4, 1)),
    ("Ulysses", Strategy::Ring, (1, 4)),
    ("ring x Ulysses", Strategy::Ring, (2, 2)),
];

const LAYOUTS: [LayoutKind; 4] =
    [LayoutKind::Contiguous, LayoutKind::Zigzag, LayoutKind::Striped(3), LayoutKind::PerDocumentZigzag];

fn rows() -> Vec<(&'static str, Problem)> {
    let packed = Documents::packed(&[9, 1, 16, 11]);
    let padded = Documents::padded(&[19, 5], 19).expect("fits");
    vec![
        ("full", Problem::new(2, 37, 4, 2, 16, Mask::full())),
        ("causal", Problem::new(2, 37, 4, 2, 16, Mask::causal())),
        ("causal, aligned to the end", Problem::cross(2, 11, 37, 4, 2, 16, Mask::causal_bottom_right())),
        ("window, both sides", Problem::new(2, 37, 4, 2, 16, Mask::full().window(Some(6), Some(3)))),
        ("causal window", Problem::new(2, 37, 4, 2, 16, Mask::causal().window(Some(6), None))),
        ("packed documents", Problem::with_documents(packed, 1, 4, 2, 16, Mask::causal())),
        ("padding", Problem::with_documents(padded, 2, 4, 2, 16, Mask::causal())),
        ("cross attention", Problem::cross(2, 23, 37, 4, 2, 16, Mask::full())),
        ("one key head (MQA)", Problem::new(1, 37, 4, 1, 16, Mask::causal())),
        ("heads that do not divide", Problem::new(1, 37, 6, 3, 16, Mask::causal())),
        ("more ranks than tokens", Problem::new(1, 3, 4, 2, 16, Mask::causal())),
    ]
}

/// One cell: yes if all layouts give the reference's outputs and gradients; else the error's words.
fn cell(problem: &Problem, strategy: Strategy, mesh: (usize, usize)) -> String {
    let inputs = problem.inputs(7);
    let wanted = problem.reference(&inputs);
    for kind in LAYOUTS {
        match problem.on_mesh(&inputs, kind, strategy, mesh.0, mesh.1) {
            Err(error) => return error.to_string(),
            Ok(got) => {
                let pairs = [(&got.out, &wanted.out), (&got.lse, &wanted.lse), (&got.dq, &wanted.dq)];
                let pairs = pairs.into_iter().chain([(&got.dk, &wanted.dk), (&got.dv, &wanted.dv)]);
                if pairs.into_iter().any(|(got, wanted)| relative_l2(got, wanted) > 1e-5) {
                    return format!("wrong in layout {kind}");
                }
            }
        }
    }
    "yes".to_owned()
}

#[test]
fn the_readme_says_what_works_with_what() {
    let mut table =
        format!("| |{}|\n|---|{}|\n", COLUMNS.map(|c| format!(" {} ", c.0)).join("|"), ["---"; 4].join("|"));
    for (name, problem) in rows() {
        let cells = COLUMNS.map(|(_, strategy, mesh)| cell(&problem, strategy, mesh));
        table += &format!("| {name} | {} |\n", cells.join(" | "));
    }
    let readme = include_str!("../../../README.md");
    assert!(readme.contains(&table), "README.md should hold this table:\n{table}");
}
