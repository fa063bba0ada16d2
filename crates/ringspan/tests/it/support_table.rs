//! The table of supported features is true: every cell is computed and compared, and the README shows the table.

use ringspan::attention::Wire;
use ringspan::mask::BlockPairs;
use ringspan::mesh::Grid;
use ringspan::support::{Feature, table};
use ringspan::{Documents, LayoutKind, Mask, StrategyKind};
use ringspan_testing::mesh::{MeshSetup, Problem};

const LAYOUTS: [LayoutKind; 5] = [
    LayoutKind::Contiguous,
    LayoutKind::Zigzag,
    LayoutKind::Striped(3),
    LayoutKind::PerDocumentZigzag,
    LayoutKind::Balanced(None),
];

/// Problems that use a feature.
fn problems(feature: Feature) -> Vec<Problem> {
    let causal = |heads, kv_heads| Problem::new(2, 37, heads, kv_heads, 16, Mask::causal());
    let masked = |mask| vec![Problem::new(2, 37, 4, 2, 16, mask)];
    let documents = |documents, batch| Problem::with_documents(documents, batch, 4, 2, 16, Mask::causal());
    let of_widths = |widths: &[(usize, usize)]| {
        let of = |&(dim, v_dim)| Problem { v_dim, ..Problem::new(1, 19, 4, 2, dim, Mask::causal()) };
        widths.iter().map(of).collect::<Vec<_>>()
    };
    match feature {
        Feature::Contiguous
        | Feature::Zigzag
        | Feature::Striped
        | Feature::PerDocumentZigzag
        | Feature::Balanced
        | Feature::Causal
        | Feature::F32 => vec![causal(4, 2)],
        Feature::Full => masked(Mask::full()),
        Feature::CausalBottomRight => vec![Problem::cross(2, 11, 37, 4, 2, 16, Mask::causal_bottom_right())],
        Feature::Window => masked(Mask::full().window(Some(6), Some(3))),
        Feature::WindowAfterCache => {
            // 11 queries follow a cache of 26 keys: query i is at the position of key 26 + i.
            let of = |mask, sees| Problem { visible: Some(sees), ..Problem::cross(2, 11, 37, 4, 2, 16, mask) };
            vec![
                of(Mask::full_bottom_right().window(Some(9), Some(2)), |i, j| 17 + i <= j && j <= 28 + i),
                of(Mask::causal_bottom_right().window(Some(9), None), |i, j| 17 + i <= j && j <= 26 + i),
            ]
        }
        Feature::Chunked => masked(Mask::causal().chunked(10).expect("not 0")),
        Feature::PrefixLm => masked(Mask::causal().prefix_lm([5, 12])),
        Feature::BlockSparse => {
            let pairs = (0..10).flat_map(|a| (0..=a).map(move |b| (a, b))).filter(|(a, b)| (a + b) % 3 != 1);
            masked(Mask::causal().block_sparse(BlockPairs::new(4, 4, pairs).expect("not 0")))
        }
        Feature::Documents => vec![documents(Documents::packed(&[9, 1, 16, 11]), 1)],
        Feature::Padding => {
            let left: Vec<i32> = (0..38).map(|t| i32::from(t % 19 > 5)).collect();
            let between: Vec<i32> = (0..38).map(|t| [1, 0, 2, 1][t / 10]).collect();
            vec![
                documents(Documents::padded(&[19, 5], 19).expect("fits"), 2),
                documents(Documents::from_ids(&left, 19).expect("full rows"), 2),
                documents(Documents::from_ids(&between, 38).expect("full row"), 1),
            ]
        }
        Feature::CrossAttention => vec![Problem::cross(2, 23, 37, 4, 2, 16, Mask::full())],
        Feature::Scale => vec![causal(4, 2).with_score("scale", |_, score| score.scale = 0.6)],
        Feature::Softcap => vec![causal(4, 2).with_softcap()],
        Feature::Alibi => vec![causal(4, 2).with_alibi()],
        Feature::RelativeBuckets => vec![causal(4, 2).with_buckets()],
        Feature::Bias => vec![causal(4, 2).with_bias(4), causal(4, 2).with_bias(1)],
        Feature::Sinks => vec![causal(4, 2).with_sinks()],
        Feature::OffByOne => {
            vec![causal(4, 2).with_score("off by one", |_, score| *score = score.clone().off_by_one(4))]
        }
        Feature::Dropout => vec![causal(4, 2).with_dropout()],
        Feature::Grouped => vec![causal(8, 2), causal(8, 1)],
        Feature::UnevenHeads => vec![causal(6, 3), causal(7, 1)],
        Feature::FewTokens => vec![Problem::new(1, 3, 4, 2, 16, Mask::causal())],
        Feature::ValueWidth => of_widths(&[(48, 32), (16, 40)]),
        Feature::WideHeads => of_widths(&[(8, 8), (80, 80), (192, 128), (256, 256), (576, 512)]),
        Feature::Strided => vec![Problem { strided: true, ..causal(4, 2) }],
        Feature::Bf16 | Feature::F16 => vec![causal(4, 2), causal(4, 2).with_bias(4)],
    }
}

/// The layouts, the storage and wire type, and the tolerance with which a feature is tested.
fn conditions(feature: Feature) -> (&'static [LayoutKind], Wire, f64) {
    match feature {
        Feature::Contiguous => (&LAYOUTS[..1], Wire::F32, 1e-5),
        Feature::Zigzag => (&LAYOUTS[1..2], Wire::F32, 1e-5),
        Feature::Striped => (&LAYOUTS[2..3], Wire::F32, 1e-5),
        Feature::PerDocumentZigzag => (&LAYOUTS[3..4], Wire::F32, 1e-5),
        Feature::Balanced => (&LAYOUTS[4..], Wire::F32, 1e-5),
        Feature::Bf16 => (&LAYOUTS, Wire::Bf16, 8e-3),
        Feature::F16 => (&LAYOUTS, Wire::F16, 1e-3),
        _ => (&LAYOUTS, Wire::F32, 1e-5),
    }
}

/// The problem with a cell: `None` if every layout and grid gives the reference's answer.
fn computed(feature: Feature, strategy: StrategyKind) -> Option<String> {
    let (layouts, of, bound) = conditions(feature);
    let grids = [Grid::new(4, 1), Grid::new(1, 4), Grid::new(2, 2), Grid::new(2, 2).with_ulysses_outer()];
    for problem in problems(feature) {
        let inputs = problem.inputs_of(of, 7);
        let wanted = problem.reference(&inputs);
        for (&kind, grid) in layouts.iter().flat_map(|kind| grids.map(|grid| (kind, grid))) {
            let on = MeshSetup { stored: of, wire: of, ..MeshSetup::new(kind, strategy, grid) };
            match problem.on_mesh(&inputs, on) {
                Err(error) => return Some(error.to_string()),
                Ok(got) => {
                    if let Some((name, error)) = wanted.difference(&got, bound) {
                        return Some(format!("{}, {on:?}: {name} differs by {error:e}", problem.name));
                    }
                }
            }
        }
    }
    None
}

#[test]
fn every_cell_works() {
    for &feature in Feature::ALL {
        for strategy in StrategyKind::ALL {
            assert_eq!(computed(feature, strategy), None, "{} with {strategy}", feature.name());
        }
    }
}

#[test]
fn the_readme_shows_the_table() {
    let table = table();
    assert!(include_str!("../../../../README.md").contains(&table), "README.md should hold this table:\n{table}");
}
