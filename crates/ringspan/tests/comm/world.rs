//! Worlds whose ranks take work repeatedly, also after failures.

use ringspan::attention::{self, Group, Inputs};
use ringspan::comm::process_group::ProcessGroup;
use ringspan::comm::{Buffer, Communicator, threads};
use ringspan::kernel::View;
use ringspan::world::Options;
use ringspan::{Documents, Error, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind, World};
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::Duration;

fn world(size: usize, threads_per_rank: usize) -> World {
    let ranks = threads::Options { deadline: Duration::from_secs(20), ..Default::default() };
    World::threads_with(size, Options { threads_per_rank, ranks }).expect("threads")
}

#[test]
fn ranks_stay_between_calls_with_what_they_keep() {
    let mut world = world(3, 1);
    let here = |world: &mut World| world.run(|_| Ok::<ThreadId, Error>(thread::current().id())).expect("no failure");
    let first = here(&mut world);
    let mut steps = vec![Vec::new(); 3];
    for step in 0..50_u64 {
        let result = world.run_with(&mut steps, |rank, steps: &mut Vec<u64>| {
            let all = rank.communicator().all_gather(Buffer::U64(vec![step + rank.index() as u64]))?;
            let Buffer::U64(last) = &*all[2] else { panic!("another type") };
            steps.push(last[0]);
            Ok::<_, Error>(rank.index())
        });
        assert_eq!(result, Ok(vec![0, 1, 2]));
    }
    assert!(steps.iter().all(|steps| *steps == (2..52).collect::<Vec<u64>>()), "{steps:?}");
    assert_eq!(here(&mut world), first, "the same threads in the first and the last call");
}

#[test]
fn a_group_of_one_call_attends_in_the_next_on_the_ranks_threads() {
    let documents = Documents::batch(1, 23);
    let layout = Layout::new(LayoutKind::Zigzag, &documents, 4).expect("a layout");
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (2, 2)).expect("a schedule");
    let values: Vec<f32> = (0..23 * 2 * 4).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut world = world(4, 2);
    let mut groups = world.run(|rank| Group::new(rank.communicator().clone(), (2, 2), rank.kernel())).expect("groups");
    let attend = |world: &mut World, groups: &mut [Group]| {
        world.run_with(groups, |rank, group| {
            assert_eq!((rank.threads(), rayon::current_num_threads()), (2, 2));
            let local = layout.shard(rank.index(), &values, 8)?;
            let view = View::new(&local, local.len() / 8, 2, 4).expect("a view");
            attention::forward(group, &schedule, &Inputs::new(view, view, view, &Score::new(0.5)))
                .map(|saved| saved.out)
        })
    };
    let first = attend(&mut world, &mut groups).expect("attention");
    for _ in 0..5 {
        assert_eq!(attend(&mut world, &mut groups).expect("attention"), first);
    }
}

#[test]
fn a_single_process_runs_a_world_of_any_size_as_threads() {
    let processes = ProcessGroup::single();
    for size in [1, 3] {
        let mut world = World::start(&processes, size, Options::default()).expect("threads");
        assert_eq!((world.size(), world.local_size(), world.is_lead()), (size, size, true));
        assert_eq!(world.run(|rank| Ok::<_, Error>(rank.index())), Ok((0..size).collect()));
    }
    assert!(World::start(&processes, 0, Options::default()).is_err());
}

#[test]
fn a_panic_ends_the_call_by_name_and_the_world_works_on() {
    let mut world = world(4, 2);
    let kept = world.run(|rank| Ok::<_, Error>(rank.communicator().clone())).expect("communicators");
    for _ in 0..3 {
        let failed = world.run(|rank| {
            assert!(rank.index() != 2, "rank two is tired");
            rank.communicator().barrier()
        });
        match failed {
            Err(Error::Panicked { rank: 2, message }) => assert!(message.contains("tired"), "{message}"),
            other => panic!("{other:?}"),
        }
        let sums = world.run(|rank| {
            let mut sum = [1.0];
            rank.communicator().all_reduce(&mut sum).map(|()| sum[0])
        });
        assert_eq!(sums, Ok(vec![4.0; 4]));
    }
    // A communicator that was made before the failure is closed, and says why.
    let old = kept[0].barrier().expect_err("closed").to_string();
    assert!(old.contains("rank 2") && old.contains("tired"), "{old}");
}

#[test]
fn an_error_of_a_rank_is_that_of_the_call() {
    let mut world = world(3, 1);
    for attempt in 0..3 {
        let failed = world.run(|rank| match rank.index() {
            1 => Err(Error::Layout(format!("attempt {attempt}"))),
            _ => rank.communicator().barrier(),
        });
        assert_eq!(failed, Err(Error::Layout(format!("attempt {attempt}"))));
    }
}

#[test]
fn ranks_that_wait_for_each_other_are_told_at_once_with_several_threads_too() {
    let mut world = world(2, 3);
    let stuck = world.run(|rank| rank.communicator().receive(1 - rank.index(), 7)?.wait().map(drop));
    let problem = stuck.expect_err("a deadlock").to_string();
    assert!(problem.contains("deadlock"), "{problem}");
    assert_eq!(world.run(|rank| rank.communicator().barrier()), Ok(vec![(), ()]));
}

#[test]
fn a_message_that_nobody_received_does_not_reach_the_next_call() {
    let mut world = world(2, 1);
    let send = |comm: &Arc<dyn Communicator>, value| -> Result<(), Error> {
        if comm.rank() == 0 {
            comm.send(1, 5, Arc::new(Buffer::U64(vec![value])))?.wait()?;
        }
        Ok(())
    };
    let kept = world.run(|rank| send(rank.communicator(), 1).map(|()| rank.communicator().clone())).expect("sent");
    let received = world.run(|rank| {
        send(rank.communicator(), 2)?;
        match rank.index() {
            1 => rank.communicator().receive(0, 5)?.wait(),
            _ => Ok(None),
        }
    });
    assert_eq!(received.expect("received")[1].as_deref(), Some(&Buffer::U64(vec![2])));
    let closed = kept[1].barrier().expect_err("closed").to_string();
    assert!(closed.contains("from rank 0 to rank 1 under tag 5"), "{closed}");
}

#[test]
fn impossible_worlds_and_states_are_refused_with_the_numbers() {
    assert!(matches!(World::threads(0), Err(Error::MeshSize { needed: 1, ranks: 0, .. })));
    let many = World::threads(1 << 40).expect_err("too many").to_string();
    assert!(many.contains("1099511627776 ranks") && many.contains("GB"), "{many}");
    let few = world(2, 1).run_with(&mut [0], |_, _| Ok::<_, Error>(())).expect_err("one state").to_string();
    assert!(few.contains('2') && few.contains('1'), "{few}");
}

#[test]
fn many_calls_in_a_row_end() {
    let mut world = world(8, 1);
    for call in 0..500 {
        let sum = world.run(|rank| {
            let mut sum = [rank.index() as f32 + call as f32];
            rank.communicator().all_reduce(&mut sum).map(|()| sum[0])
        });
        assert_eq!(sum, Ok(vec![28.0 + 8.0 * call as f32; 8]));
    }
}
