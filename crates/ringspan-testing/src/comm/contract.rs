//! The behaviour that every transport must have if nothing fails. Each function is the program of one rank, and checks its
//! results.

use ringspan::Error;
use ringspan::comm::{Buffer, Communicator, Pending};
use std::sync::Arc;

type Comm = Arc<dyn Communicator>;

fn f32s(buffer: &Buffer) -> Vec<f32> {
    match buffer {
        Buffer::F32(values) => values.clone(),
        other => panic!("expected f32, got {other:?}"),
    }
}

/// Every collective, with lengths that differ between ranks.
pub fn collectives(comm: &Comm) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let gathered = comm.all_gather(Buffer::F32(vec![rank as f32; rank]))?;
    for (from, part) in gathered.iter().enumerate() {
        assert_eq!(f32s(part), vec![from as f32; from]);
    }
    // Rank r sends r + 2 t elements to rank t.
    let parts = (0..size).map(|to| Buffer::F32(vec![(10 * rank + to) as f32; rank + 2 * to])).collect();
    for (from, part) in comm.all_to_all(parts)?.iter().enumerate() {
        assert_eq!(f32s(part), vec![(10 * from + rank) as f32; from + 2 * rank]);
    }
    // Two exchanges under way at once, waited for in the other order.
    let start = |tag: u64| {
        let part = |to: usize| Arc::new(Buffer::F32(vec![(100 * tag as usize + 10 * rank + to) as f32; rank + to]));
        comm.start_all_to_all(tag, (0..size).map(part).collect())
    };
    let [first, mut second] = [start(1)?, start(2)?];
    for from in 0..size {
        let part = second.next_part()?.expect("a part of each rank");
        assert_eq!(f32s(&part), vec![(200 + 10 * from + rank) as f32; from + rank]);
    }
    assert_eq!(second.next_part()?, None);
    second.finish()?;
    for (from, part) in first.wait()?.iter().enumerate() {
        assert_eq!(f32s(part), vec![(100 + 10 * from + rank) as f32; from + rank]);
    }
    let few = comm.start_all_to_all(3, Vec::new()).err().map(|error| error.to_string());
    assert!(few.is_some_and(|text| text.contains(&format!("0 parts for {size} ranks"))));
    let total = (size * (size + 1) / 2) as f32;
    let mut sum: Vec<f32> = (0..7).map(|i| (rank + 1) as f32 * i as f32).collect();
    comm.all_reduce(&mut sum)?;
    assert_eq!(sum, (0..7).map(|i| total * i as f32).collect::<Vec<_>>());
    let counts: Vec<usize> = (0..size).collect();
    let own = comm.reduce_scatter(vec![(rank + 1) as f32; counts.iter().sum()], &counts)?;
    assert_eq!(own, vec![total; rank]);
    let root = size / 2;
    let data = (rank == root).then(|| Buffer::U64(vec![42, 7]));
    assert_eq!(*comm.broadcast(root, data)?, Buffer::U64(vec![42, 7]));
    comm.barrier()
}

/// Sums whose bits depend on the order of the ranks.
pub fn sums(comm: &Comm) -> Result<(), Error> {
    let value = |rank: usize, i: usize| ((rank * 31 + i * 17) as f32).sin() * 10f32.powi(rank as i32 % 7 - 3);
    for len in [0, 1, 101, 100_003] {
        let mut sum: Vec<f32> = (0..len).map(|i| value(comm.rank(), i)).collect();
        comm.all_reduce(&mut sum)?;
        let wanted = |i: usize| (1..comm.size()).fold(value(0, i), |sum, rank| sum + value(rank, i));
        assert!(sum.iter().enumerate().all(|(i, sum)| sum.to_bits() == wanted(i).to_bits()), "{len} elements");
    }
    // The sum of -0 is -0.
    let mut zero = [-0.0f32];
    comm.all_reduce(&mut zero)?;
    assert_eq!(zero[0].to_bits(), (-0.0f32).to_bits());
    Ok(())
}

/// Messages between neighbours: order within a tag, different tags, all types, empty ones, to oneself, dropped handles.
pub fn order(comm: &Comm) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    for (tag, value) in [(7, 1.0), (9, 2.0), (7, 3.0)] {
        comm.send(next, tag, Arc::new(Buffer::F32(vec![value])))?;
    }
    let take = |tag| Ok::<_, Error>(f32s(&comm.receive(before, tag)?.wait()?.expect("a payload"))[0]);
    assert_eq!([take(9)?, take(7)?, take(7)?], [2.0, 1.0, 3.0]);

    let kinds = [
        Buffer::U16(vec![rank as u16; 5]),
        Buffer::U64(vec![u64::MAX - rank as u64; 3]),
        Buffer::U8(vec![]),
        Buffer::F32(vec![f32::from_bits(0x7fc0_1234); 70_000]),
    ];
    let sent = kinds.iter().map(|kind| comm.send(next, 1, Arc::new(kind.clone()))).collect::<Result<Vec<_>, _>>()?;
    for kind in &kinds {
        let got = comm.receive(before, 1)?.wait()?.expect("a payload");
        match (&*got, kind) {
            (Buffer::U16(got), Buffer::U16(_)) => assert_eq!(*got, vec![before as u16; 5]),
            (Buffer::U64(got), Buffer::U64(_)) => assert_eq!(*got, vec![u64::MAX - before as u64; 3]),
            (Buffer::U8(got), Buffer::U8(_)) => assert!(got.is_empty()),
            // A NaN keeps its bits.
            (Buffer::F32(got), Buffer::F32(all)) => {
                assert!(got.len() == all.len() && got.iter().all(|x| x.to_bits() == 0x7fc0_1234));
            }
            other => panic!("another type: {other:?}"),
        }
    }
    sent.into_iter().try_for_each(|sent| sent.wait().map(drop))?;

    // The receive of the second of three messages is dropped, which uses up the message.
    let [first, second, third] = [comm.receive(before, 2)?, comm.receive(before, 2)?, comm.receive(before, 2)?];
    drop(second);
    for n in 0..3 {
        comm.send(next, 2, Arc::new(Buffer::U64(vec![n])))?;
    }
    assert_eq!(third.wait()?.as_deref(), Some(&Buffer::U64(vec![2])));
    assert_eq!(first.wait()?.as_deref(), Some(&Buffer::U64(vec![0])));

    let mut own = comm.receive(rank, 3)?;
    assert!(!own.test()?);
    comm.send(rank, 3, Arc::new(Buffer::U64(vec![17])))?.wait()?;
    assert!(own.test()?);
    assert_eq!(own.wait()?.as_deref(), Some(&Buffer::U64(vec![17])));
    comm.barrier()
}

/// Both sides send a large message before either receives; calls of `test` are enough to move it.
pub fn both_send_first(comm: &Comm, elements: usize) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let block = |rank: usize| Buffer::F32((0..elements).map(|i| (rank * 7 + i % 8191) as f32).collect());
    let mut sent = comm.send(next, 0, Arc::new(block(rank)))?;
    let mut coming: Box<dyn Pending> = comm.receive(before, 0)?;
    while !(sent.test()? & coming.test()?) {
        std::thread::yield_now();
    }
    assert!(coming.wait()?.as_deref() == Some(&block(before)), "a block of {elements} elements is damaged");
    sent.wait().map(drop)
}

/// The counted bytes are the payload sent to other ranks, and nothing else.
pub fn bytes(comm: &Comm) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let part = |to: usize| if to.is_multiple_of(2) { Buffer::F32(vec![0.0; 10]) } else { Buffer::U16(vec![0; 10]) };
    let start = comm.bytes_sent();
    comm.all_to_all((0..size).map(part).collect())?;
    let others: u64 = (0..size).filter(|to| *to != rank).map(|to| part(to).bytes()).sum();
    assert_eq!(comm.bytes_sent() - start, others);
    // A split sends color and key, 16 bytes, to each other rank; one word is sent to rank 0.
    let group = comm.split(0, rank)?;
    group.send(0, 1, Arc::new(Buffer::U64(vec![1])))?.wait()?;
    assert_eq!(group.bytes_sent() - start, others + 16 * (size as u64 - 1) + if rank == 0 { 0 } else { 8 });
    if rank == 0 {
        (0..size).try_for_each(|from| group.receive(from, 1)?.wait().map(drop))?;
    }
    comm.barrier()
}

/// Groups of even and odd ranks in reverse order, and groups of one rank.
pub fn groups(comm: &Comm) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let half = comm.split(rank % 2, size - rank)?;
    let members: Vec<usize> = (0..size).rev().filter(|other| other % 2 == rank % 2).collect();
    assert_eq!((half.size(), members[half.rank()]), (members.len(), rank));
    let mut sum = [rank as f32];
    half.all_reduce(&mut sum)?;
    assert_eq!(sum, [members.iter().sum::<usize>() as f32]);
    let single = half.split(half.rank(), 0)?;
    assert_eq!(single.size(), 1);
    single.barrier()?;
    comm.barrier()
}
