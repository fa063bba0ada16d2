//! In every interleaving, messages and collectives give the same results as without races.

use super::comm::Buffer;
use super::error::Error;
use super::{Comm, explore, number, outcome, value};

/// The result of a receive.
fn wait(pending: Box<dyn super::comm::Pending>) -> Result<u64, Error> {
    Ok(value(&pending.wait()?.expect("a receive has a payload")))
}

#[test]
fn messages_keep_the_order_of_their_tag_whichever_side_is_first() {
    explore(20000, || {
        let got = outcome(2, |comm| {
            if comm.rank() == 0 {
                for (tag, n) in [(1, 10), (2, 20), (1, 11), (2, 21)] {
                    comm.send(1, tag, number(n))?.wait()?;
                }
                return Ok((comm.bytes_sent(), vec![]));
            }
            // Receives are posted in one order and waited for in another; one of a pair is posted after the other has
            // finished.
            let (second, first) = (comm.receive(0, 2)?, comm.receive(0, 1)?);
            let second = wait(second)?;
            let later = comm.receive(0, 1)?;
            let last = comm.receive(0, 2)?;
            Ok((comm.bytes_sent(), vec![wait(last)?, wait(later)?, second, wait(first)?]))
        });
        assert_eq!(got.whole, Ok(vec![(32, vec![]), (0, vec![21, 11, 20, 10])]));
    });
}

#[test]
fn a_ring_turns_whether_ranks_send_or_receive_first() {
    explore(15000, || {
        let got = outcome(3, |comm| {
            let (rank, size) = (comm.rank(), comm.size());
            let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
            let mut held = rank as u64;
            for step in 0..2 {
                let block = number(held);
                held = if rank.is_multiple_of(2) {
                    comm.send(next, step, block)?;
                    wait(comm.receive(before, step)?)?
                } else {
                    let posted = comm.receive(before, step)?;
                    comm.send(next, step, block)?;
                    wait(posted)?
                };
            }
            Ok(held)
        });
        assert_eq!(got.whole, Ok(vec![1, 2, 0]));
    });
}

#[test]
fn a_message_outlives_the_rank_that_sent_it() {
    explore(15000, || {
        let got = outcome(2, |comm| match comm.rank() {
            0 => {
                comm.send(1, 0, number(7))?;
                comm.send(1, 0, number(8)).map(|_| 0)
            }
            _ => {
                // A receive that is dropped uses up its message.
                drop(comm.receive(0, 0)?);
                wait(comm.receive(0, 0)?)
            }
        });
        assert_eq!(got.whole, Ok(vec![0, 8]));
    });
}

#[test]
fn a_polled_receive_turns_true_and_stays_so() {
    explore(5000, || {
        let got = outcome(2, |comm| match comm.rank() {
            0 => comm.send(1, 3, number(5)).map(|_| 5),
            _ => {
                let mut pending = comm.receive(0, 3)?;
                while !pending.test()? {
                    shuttle::thread::yield_now();
                }
                assert!(pending.test()?);
                wait(pending)
            }
        });
        assert_eq!(got.whole, Ok(vec![5, 5]));
    });
}

#[test]
fn collectives_of_one_group_follow_each_other() {
    explore(7000, || {
        let got = outcome(3, |comm| {
            let rank = comm.rank();
            let gathered = comm.all_gather(Buffer::U64(vec![rank as u64]))?;
            let parts = (0..3).map(|to| Buffer::U64(vec![(10 * rank + to) as u64])).collect();
            let swapped = comm.all_to_all(parts)?;
            let mut sum = [rank as f32, 1.0];
            comm.all_reduce(&mut sum)?;
            let root = comm.broadcast(1, (rank == 1).then(|| Buffer::U64(vec![9])))?;
            comm.barrier()?;
            let all = |buffers: &[std::sync::Arc<Buffer>]| buffers.iter().map(|b| value(b)).collect::<Vec<_>>();
            Ok((all(&gathered), all(&swapped), sum, value(&root)))
        });
        let expected = |rank: u64| (vec![0, 1, 2], vec![rank, 10 + rank, 20 + rank], [3.0, 3.0], 9);
        assert_eq!(got.whole, Ok((0..3).map(expected).collect()));
    });
}

#[test]
fn collectives_of_rows_and_columns_overlap() {
    explore(4000, || {
        let got = outcome(4, |comm| {
            let (row, column) = (comm.rank() / 2, comm.rank() % 2);
            let rows = comm.split(row, column)?;
            let columns = comm.split(column, row)?;
            let mut sum = [comm.rank() as f32];
            rows.all_reduce(&mut sum)?;
            columns.all_reduce(&mut sum)?;
            // A message in a group is not received in another group with the same ranks and tag.
            let pair = [&rows, &columns].map(|group| group.receive(1 - group.rank(), 0));
            columns.send(1 - row, 0, number(100 + comm.rank() as u64))?;
            rows.send(1 - column, 0, number(200 + comm.rank() as u64))?;
            let [in_row, in_column] = pair;
            Ok((sum[0], wait(in_row?)?, wait(in_column?)?))
        });
        let expected = |rank: u64| (6.0, 200 + (rank ^ 1), 100 + (rank ^ 2));
        assert_eq!(got.whole, Ok((0..4).map(expected).collect()));
    });
}

/// Starts a thread of the model. It is not scoped, because a scoped thread wakes its creator wherever that waits.
fn start<T: Send + 'static>(task: impl FnOnce() -> T + Send + 'static) -> shuttle::thread::JoinHandle<T> {
    shuttle::thread::spawn(task)
}

/// Lets the rank communicate from a second thread, which must be known before one of its threads waits.
fn talk_from_another_thread(comm: &Comm) -> Result<(), Error> {
    let comm = comm.clone();
    start(move || comm.send(comm.rank(), 9, number(0)).map(drop)).join().expect("no panic")
}

#[test]
fn two_threads_of_a_rank_wait_for_different_messages() {
    explore(10000, || {
        let got = outcome(2, |comm| {
            if comm.rank() == 0 {
                // It waits for rank 1 while rank 1's first thread waits for rank 0. This is no deadlock: rank 1's other
                // thread sends.
                wait(comm.receive(1, 2)?)?;
                comm.send(1, 0, number(10))?;
                comm.send(1, 1, number(11))?;
                // It stays until both messages have arrived, because its end would wake all threads.
                return wait(comm.receive(1, 3)?).map(|end| [end; 2]);
            }
            talk_from_another_thread(comm)?;
            let other = comm.clone();
            let other = start(move || {
                other.send(0, 2, number(1))?;
                wait(other.receive(0, 1)?)
            });
            let own = wait(comm.receive(0, 0)?)?;
            let other = other.join().expect("no panic")?;
            comm.send(0, 3, number(0)).map(|_| [own, other])
        });
        assert_eq!(got.whole, Ok(vec![[0, 0], [10, 11]]));
    });
}

/// Two threads of every rank run collectives in different groups, and wait on the same condition variable of the rank.
fn both_groups_at_once(comm: &Comm) -> Result<[f32; 2], Error> {
    let groups = [comm.split(0, comm.rank())?, comm.split(0, comm.rank())?];
    talk_from_another_thread(comm)?;
    let [one, two] = groups.map(|group| {
        move || {
            let mut sum = [1.0 + group.rank() as f32];
            group.all_reduce(&mut sum).map(|()| sum[0])
        }
    });
    let two = start(two);
    let one = one()?;
    Ok([one, two.join().expect("no panic")?])
}

#[test]
fn two_threads_of_a_rank_wait_in_different_groups() {
    explore(7000, || {
        let got = outcome(2, both_groups_at_once);
        assert_eq!(got.whole, Ok(vec![[3.0, 3.0]; 2]));
    });
}
