use super::*;

/// Makes sizes from text: `tp pp attn_dp attn_cp ep moe_dp`.
fn sizes([tp, pp, attn_dp, attn_cp, ep, moe_dp]: [usize; 6]) -> Serving {
    Serving { tp, pp, attn_dp, attn_cp, ep, moe_dp, dcp: None }
}

/// Makes groups of ranks from text such as `04 15`, `0,8 1,9` or `0-3 4-7`.
fn groups(text: &str) -> Vec<Vec<usize>> {
    let number = |text: &str| text.parse().expect("a rank");
    let group = |text: &str| match (text.split_once('-'), text.contains(',')) {
        (Some((first, last)), _) => (number(first)..=number(last)).collect(),
        (None, true) => text.split(',').map(number).collect(),
        (None, false) => text.chars().map(|c| c.to_digit(10).expect("a rank") as usize).collect(),
    };
    text.split_whitespace().map(group).collect()
}

#[track_caller]
fn check(id: &str, of: [usize; 6], lists: [&str; 6]) {
    let sizes = sizes(of);
    let topology = sizes.topology().expect(id);
    let singles: Vec<Vec<usize>> = (0..topology.world()).map(|rank| vec![rank]).collect();
    for (name, expected) in ["attn_cp", "attn_tp", "moe_dp", "moe_ep", "moe_tp", "pp"].into_iter().zip(lists) {
        let expected = match expected {
            "singles" => singles.clone(),
            "pairs" => singles.chunks(2).map(<[_]>::concat).collect(),
            "tp" | "attn_cp" => topology.groups(expected).expect(id),
            text => groups(text),
        };
        assert_eq!(topology.groups(name).expect(id), expected, "{id}: {name}");
    }
}

/// The cases were worked out by hand from the rules of SGLang's parallel state, in its order of sizes.
#[test]
fn the_worked_cases_have_the_groups_that_were_worked_out() {
    let evens = "0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15";
    let by_four = "0,4,8,12 1,5,9,13 2,6,10,14 3,7,11,15";
    let apart = "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15";
    let fours = "0-3 4-7 8-11 12-15";
    let halves = "04 15 26 37";
    let (steps, twos) = ("02 13 46 57", "01 23 45 67");
    check("A8", [8, 1, 1, 2, 4, 2], [halves, "0-3 4-7", halves, "0-3 4-7", "singles", "singles"]);
    check("B8", [8, 1, 2, 2, 8, 1], [steps, twos, "attn_cp", "tp", "singles", "singles"]);
    check("C8", [8, 1, 1, 4, 2, 4], ["0246 1357", twos, "0246 1357", twos, "singles", "singles"]);
    check("D8", [4, 2, 1, 2, 4, 1], [steps, twos, "attn_cp", "0-3 4-7", "singles", halves]);
    check("E8", [4, 2, 1, 2, 2, 2], [steps, twos, steps, twos, "singles", halves]);
    check("F8", [8, 1, 1, 8, 1, 1], ["tp", "singles", "attn_cp", "singles", "tp", "singles"]);
    check("G8", [8, 1, 2, 2, 2, 2], [steps, twos, halves, steps, twos, "singles"]);
    check("A16", [16, 1, 1, 4, 4, 4], [by_four, fours, "attn_cp", fours, "singles", "singles"]);
    check(
        "B16",
        [16, 1, 2, 4, 8, 1],
        [evens, "pairs", "attn_cp", "0,2,4,6,8,10,12,14 1,3,5,7,9,11,13,15", "pairs", "singles"],
    );
    let stages = "04 15 26 37 8,12 9,13 10,14 11,15";
    check("C16", [8, 2, 1, 2, 2, 2], [stages, fours, "attn_cp", "02 13 46 57 8,10 9,11 12,14 13,15", "pairs", apart]);
    check("D16", [8, 2, 1, 4, 4, 1], [evens, "pairs", "attn_cp", "attn_cp", "pairs", apart]);
    check("G16", [16, 1, 1, 2, 1, 2], [apart, "0-7 8-15", "attn_cp", "singles", "0-7 8-15", "singles"]);
}

#[test]
fn ranks_of_the_worked_cases_have_the_coordinates_that_were_worked_out() {
    let expect = |of: [usize; 6], rank: usize, expected: &[(&str, usize)]| {
        let all = sizes(of).topology().expect("valid").coordinates(rank);
        assert!(expected.iter().all(|pair| all.contains(pair)), "{of:?}, rank {rank}: {all:?}");
    };
    let b16 = [("attn_dp", 1), ("attn_cp", 1), ("attn_tp", 1), ("moe_dp", 0), ("moe_ep", 5), ("moe_tp", 1)];
    expect([16, 1, 2, 4, 8, 1], 11, &b16);
    let c16 = [("pp", 1), ("attn_cp", 1), ("attn_tp", 2), ("moe_dp", 1), ("moe_ep", 1), ("moe_tp", 0), ("tp", 6)];
    expect([8, 2, 1, 2, 2, 2], 14, &c16);
    let g8 = [("attn_dp", 1), ("attn_cp", 1), ("attn_tp", 0), ("moe_dp", 1), ("moe_ep", 1), ("moe_tp", 0)];
    expect([8, 1, 2, 2, 2, 2], 6, &g8);
}

/// A list of `count` ranks: `start, start + step, ...`.
fn strided(start: usize, step: usize, count: usize) -> Vec<usize> {
    (0..count).map(|i| start + i * step).collect()
}

/// Compares the groups of worlds of up to 64 ranks with lists made from strides, without a mesh.
#[test]
fn groups_of_every_small_world_are_the_strided_lists() {
    let mut worlds = 0;
    let parts = |n: usize| (1..=n).filter(move |part| n.is_multiple_of(*part));
    for (tp, pp) in (1..=64).flat_map(|tp| (1..=64 / tp).map(move |pp| (tp, pp))) {
        for (attn_dp, attn_cp) in parts(tp).flat_map(|a| parts(tp / a).map(move |b| (a, b))) {
            for (ep, moe_dp) in parts(tp).flat_map(|a| parts(tp / a).map(move |b| (a, b))) {
                // One in seven of the sizes for larger stages is checked: all would be many more cases, and show nothing
                // more.
                if (attn_dp + attn_cp + ep + moe_dp + pp) % 7 != 0 && tp > 8 {
                    continue;
                }
                worlds += 1;
                let world = tp * pp;
                let (attn_tp, moe_tp) = (tp / attn_dp / attn_cp, tp / ep / moe_dp);
                let topology = sizes([tp, pp, attn_dp, attn_cp, ep, moe_dp]).topology().expect("valid");
                let bases = || (0..pp).map(|stage| stage * tp);
                let grouped = |outer: usize, outer_step: usize, inner: usize, step: usize, count: usize| {
                    let start = move |b| {
                        (0..outer)
                            .flat_map(move |o| (0..inner).map(move |i| strided(b + o * outer_step + i, step, count)))
                    };
                    bases().flat_map(start).collect::<Vec<_>>()
                };
                let lists = [
                    ("tp", grouped(1, tp, 1, 1, tp)),
                    ("pp", (0..tp).map(|i| strided(i, tp, pp)).collect()),
                    ("attn_dp", grouped(1, tp, tp / attn_dp, tp / attn_dp, attn_dp)),
                    ("attn_cp", grouped(attn_dp, attn_tp * attn_cp, attn_tp, attn_tp, attn_cp)),
                    ("attn_tp", grouped(tp / attn_tp, attn_tp, 1, 1, attn_tp)),
                    ("moe_ep", grouped(moe_dp, ep * moe_tp, moe_tp, moe_tp, ep)),
                    ("moe_tp", grouped(tp / moe_tp, moe_tp, 1, 1, moe_tp)),
                ];
                let moe_dp_list = match attn_cp > moe_dp {
                    true => lists[3].1.clone(),
                    false => grouped(1, tp, ep * moe_tp, ep * moe_tp, moe_dp),
                };
                for (name, list) in lists.iter().chain([&("moe_dp", moe_dp_list)]) {
                    assert_eq!(topology.groups(name).as_ref(), Ok(list), "{topology}: {name}");
                    let mut all = list.concat();
                    all.sort_unstable();
                    assert_eq!(all, (0..world).collect::<Vec<_>>(), "{topology}: {name}");
                }
                for rank in [0, world / 2, world - 1] {
                    let t = rank % tp;
                    let expected = [
                        ("tp", t),
                        ("pp", rank / tp),
                        ("attn_dp", t / (attn_tp * attn_cp)),
                        ("attn_cp", t / attn_tp % attn_cp),
                        ("attn_tp", t % attn_tp),
                        ("moe_dp", t / (tp / moe_dp)),
                        ("moe_ep", t % (tp / moe_dp) / moe_tp),
                        ("moe_tp", t % moe_tp),
                    ];
                    assert_eq!(topology.coordinates(rank), expected, "{topology}: rank {rank}");
                }
            }
        }
    }
    assert!(worlds > 5000, "{worlds}");
}

#[test]
fn a_cache_is_shared_by_neighbours_of_one_attention_replica() {
    let with = |of: [usize; 6], dcp| Serving { dcp: Some(dcp), ..sizes(of) }.topology();
    let topology = with([8, 1, 1, 1, 1, 1], 4).expect("valid");
    assert_eq!(topology.groups("dcp"), Ok(groups("0-3 4-7")));
    assert_eq!(topology.coordinates(6).last(), Some(&("dcp", 2)));
    assert_eq!(with([4, 2, 2, 1, 1, 1], 2).expect("valid").groups("dcp"), Ok(groups("01 23 45 67")));
    assert!(sizes([8, 1, 1, 1, 1, 1]).topology().expect("valid").groups("dcp").is_err());
    // The dcp size 32 divides 64 ranks, but a replica has only 16.
    let message = with([64, 1, 4, 1, 1, 1], 32).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(message.contains("attn_cp x attn_tp), 16, do not divide by dcp 32: ") && message.contains("two replicas"));
}

#[test]
fn sizes_that_do_not_divide_are_refused_where_they_would_cross_stages() {
    let message = |of| sizes(of).topology().err().map(|e| e.to_string()).unwrap_or_default();
    // Rounded down, these sizes would give the groups [2, 5, 8] and [2, 6], which include ranks of the next stage.
    assert_eq!(
        message([8, 2, 1, 1, 3, 2]),
        "mesh tp 8 x pp 2: the ranks of a stage (tp), 8, do not divide by ep 3 x moe_dp 2 = 6: moe_tp would not be whole"
    );
    assert!(message([6, 2, 1, 1, 4, 1]).contains("ep 4 x moe_dp 1 = 4"));
    assert!(message([8, 1, 3, 2, 1, 1]).contains("8, do not divide by attn_dp 3 x attn_cp 2 = 6: attn_tp"));
    assert!(message([8, 1, 1, 0, 1, 1]).contains("axis attn_cp has size 0"));
    assert!(message([0, 1, 1, 1, 1, 1]).contains("axis tp has size 0"));
    assert!(message([usize::MAX, 2, 1, 1, 1, 1]).contains("machine word"));
}
