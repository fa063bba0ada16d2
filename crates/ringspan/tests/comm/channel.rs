//! A channel between threads with the rules of NCCL: flights run one after the other, sends and receives of a pair are matched
//! in order, and no send ends before its receive has begun. Wrong orders hang, as they would with NCCL.

use ringspan::Error;
use ringspan::comm::direct::{Channel, Transfer};
use ringspan::comm::{Buffer, OnDevice};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Memory of a device: only its rank may read it, and only after it was written.
#[derive(Debug)]
pub(crate) struct Cells {
    pub(crate) owner: usize,
    len: usize,
    values: Mutex<Option<Vec<u64>>>,
}

impl Cells {
    pub(crate) fn message(owner: usize, values: Vec<u64>) -> Buffer {
        let (len, values) = (values.len(), Mutex::new(Some(values)));
        Buffer::Device(Arc::new(Self { owner, len, values }))
    }

    /// Reads a message on the device of `reader`.
    pub(crate) fn read(message: &Buffer, reader: usize) -> Vec<u64> {
        let Buffer::Device(elements) = message else { panic!("a message on the CPU: {message:?}") };
        let cells = cells(&**elements);
        assert_eq!(cells.owner, reader, "whose memory it is");
        cells.values.lock().expect("no panic under it").clone().expect("memory that was written")
    }
}

fn cells(elements: &dyn OnDevice) -> &Cells {
    (elements as &dyn std::any::Any).downcast_ref().expect("cells")
}

impl OnDevice for Cells {
    fn elements(&self) -> usize {
        self.len
    }

    fn width(&self) -> u64 {
        8
    }
}

type Flight = Vec<Option<Transfer>>;

/// The devices of all ranks.
#[derive(Default)]
pub(crate) struct Hub(Mutex<Vec<Device>>);

#[derive(Default)]
struct Device {
    flights: VecDeque<Flight>,
    ended: usize,
    /// Number of polls since a flight ended whose end has not been reported.
    questions: usize,
    aborted: bool,
    /// Whether the device accepts flights but does nothing.
    stuck: bool,
}

impl Hub {
    pub(crate) fn new(size: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new((0..size).map(|_| Device::default()).collect())))
    }

    pub(crate) fn channel(self: &Arc<Self>, rank: usize) -> Box<dyn Channel> {
        Box::new(Plane { hub: self.clone(), rank })
    }

    /// Makes the device of `rank` stop working.
    pub(crate) fn stop(&self, rank: usize) {
        self.0.lock().expect("no panic under it")[rank].stuck = true;
    }

    pub(crate) fn was_aborted(&self, rank: usize) -> bool {
        self.0.lock().expect("no panic under it")[rank].aborted
    }
}

struct Plane {
    hub: Arc<Hub>,
    rank: usize,
}

/// The first send in the first flight of `from` to `to` for which there is a receive, with that receive.
fn pair(devices: &[Device], from: usize, to: usize) -> Option<(usize, usize)> {
    let front = |rank: usize| devices[rank].flights.front().filter(|_| !devices[rank].stuck && !devices[rank].aborted);
    let sends = |t: &Option<Transfer>| matches!(t, Some(Transfer::Send { to: peer, .. }) if *peer == to);
    let receives = |t: &Option<Transfer>| matches!(t, Some(Transfer::Receive { from: peer, .. }) if *peer == from);
    front(from)?.iter().position(sends).zip(front(to)?.iter().position(receives))
}

fn settle(devices: &mut [Device]) {
    let size = devices.len();
    let mut moved = true;
    while moved {
        moved = false;
        for (from, to) in (0..size).flat_map(|from| (0..size).map(move |to| (from, to))) {
            let Some((sent, received)) = pair(devices, from, to) else { continue };
            let sent = devices[from].flights[0][sent].take().expect("a send");
            let received = devices[to].flights[0][received].take().expect("a receive");
            let (Transfer::Send { elements: source, .. }, Transfer::Receive { elements: target, .. }) =
                (sent, received)
            else {
                continue;
            };
            let (source, target) = (cells(&*source), cells(&*target));
            assert_eq!(source.len, target.len, "elements sent and expected");
            *target.values.lock().expect("no panic") = source.values.lock().expect("no panic").clone();
            moved = true;
        }
        for device in devices.iter_mut() {
            while device.flights.front().is_some_and(|flight| flight.iter().all(Option::is_none)) {
                device.flights.pop_front();
                device.ended += 1;
                moved = true;
            }
        }
    }
}

impl Channel for Plane {
    fn type_code(&self, elements: &dyn OnDevice) -> Result<u64, Error> {
        assert_eq!(cells(elements).owner, self.rank, "whose memory is sent");
        Ok(64)
    }

    fn allocate(&mut self, type_code: u64, len: usize) -> Result<Arc<dyn OnDevice>, Error> {
        assert_eq!(type_code, 64);
        Ok(Arc::new(Cells { owner: self.rank, len, values: Mutex::new((len == 0).then(Vec::new)) }))
    }

    fn start(&mut self, transfers: Vec<Transfer>) -> Result<(), Error> {
        assert!(!transfers.is_empty(), "a flight of nothing");
        let flight = transfers.into_iter().map(Some).collect();
        self.hub.0.lock().expect("no panic under it")[self.rank].flights.push_back(flight);
        Ok(())
    }

    fn take_ended(&mut self) -> Result<usize, Error> {
        let mut devices = self.hub.0.lock().expect("no panic under it");
        settle(&mut devices);
        // Ranks see the end of a flight at different times: higher ranks see it later.
        let device = &mut devices[self.rank];
        device.questions += usize::from(device.ended > 0);
        if device.questions < 30 * self.rank {
            return Ok(0);
        }
        device.questions = 0;
        Ok(std::mem::take(&mut device.ended))
    }

    fn abort(&mut self) {
        let mut devices = self.hub.0.lock().expect("no panic under it");
        devices[self.rank].aborted = true;
    }
}
