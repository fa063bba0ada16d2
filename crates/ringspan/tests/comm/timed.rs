//! Only the time that a rank waits for others is counted.

use ringspan::Error;
use ringspan::comm::threads::{self, Options};
use ringspan::comm::timed::TimedCommunicator;
use ringspan::comm::{Buffer, Communicator};
use std::time::Duration;

#[test]
fn waits_of_all_groups_count_and_arrived_messages_do_not() {
    const LATE: Duration = Duration::from_millis(30);
    let waited = threads::run(2, Options::default(), |comm| {
        let timed = TimedCommunicator::new(comm);
        let half = timed.split(0, 0)?;
        if timed.rank() == 1 {
            std::thread::sleep(LATE);
            half.send(0, 0, Buffer::U64(vec![1]).into())?.wait()?;
            half.send(0, 1, Buffer::U64(vec![2]).into())?.wait()?;
            timed.barrier()?;
            return Ok::<_, Error>([Duration::ZERO; 2]);
        }
        half.receive(1, 0)?.wait()?;
        let late = timed.waited();
        timed.barrier()?;
        let before = timed.waited();
        half.receive(1, 1)?.wait()?;
        Ok([late, timed.waited() - before])
    })
    .expect("runs");
    assert!(waited[0][0] >= LATE / 2, "{waited:?}");
    assert!(waited[0][1] < LATE / 2, "{waited:?}");
}
