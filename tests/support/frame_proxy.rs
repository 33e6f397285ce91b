//! A way to a sidecar that knows frames: it swallows one, or half of one, and its connection is cut or falls silent.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// The fate of a connection whose frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It ends, for both sides.
    Cut,
    /// The same, and others end as they come, until the proxy is opened again.
    CutAndClose,
    /// It ends, after the first half of the frame was carried.
    CutInside,
    /// It stays, but carries nothing more in either direction, not even that the sidecar has closed.
    Silence,
}

/// A trouble that comes once: with the nth frame of a type, counted over all connections.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub frame_type: u8,
    pub nth: u32,
    pub trouble: Trouble,
}

/// A proxy on a port of its own. Its threads end with their connections.
#[derive(Debug)]
pub struct FrameProxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    plan: Mutex<Vec<Planned>>,
    closed: AtomicBool,
}

impl FrameProxy {
    /// A proxy to this address, with all the troubles that will come.
    pub fn to(address: SocketAddr, plan: &[Planned]) -> FrameProxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let near_address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared { plan: Mutex::new(plan.to_vec()), closed: AtomicBool::new(false) });
        let serving = Arc::clone(&shared);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let far = (!serving.closed.load(Ordering::SeqCst)).then(|| TcpStream::connect(address));
                if let Some(Ok(far)) = far {
                    join(&near, &far, &serving);
                }
            }
        });
        FrameProxy { address: near_address, shared }
    }

    /// Connections are carried again, after [`Trouble::CutAndClose`].
    pub fn open(&self) {
        self.shared.closed.store(false, Ordering::SeqCst);
    }

    /// The troubles that did not come yet.
    pub fn still_planned(&self) -> Vec<Planned> {
        self.shared.plan.lock().expect("no holder panics").clone()
    }
}

fn join(near: &TcpStream, far: &TcpStream, shared: &Arc<Shared>) {
    let clone = |stream: &TcpStream| stream.try_clone().expect("a socket can be cloned");
    near.set_nodelay(true).expect("it is TCP");
    far.set_nodelay(true).expect("it is TCP");
    let silent = Arc::new(AtomicBool::new(false));
    for (from, to, to_near) in [(near, far, false), (far, near, true)] {
        let (from, to, shared, silent) = (clone(from), clone(to), Arc::clone(shared), Arc::clone(&silent));
        thread::spawn(move || {
            carry(&from, &to, &shared, &silent);
            let _ = from.shutdown(Shutdown::Both);
            // When one side has ended or was cut, the other is ended too; but silence hides the end of the sidecar.
            if !(to_near && silent.load(Ordering::SeqCst)) {
                let _ = to.shutdown(Shutdown::Both);
            }
        });
    }
}

/// Carries frames one way, until a side ends or the connection is to be cut.
fn carry(mut from: &TcpStream, mut to: &TcpStream, shared: &Shared, silent: &AtomicBool) {
    let mut length = [0; 4];
    while from.read_exact(&mut length).is_ok() {
        let mut frame = length.to_vec();
        let rest = u64::from(u32::from_be_bytes(length));
        if from.take(rest).read_to_end(&mut frame).is_err() || frame.len() < 12 {
            return;
        }
        if silent.load(Ordering::SeqCst) {
            continue;
        }
        match shared.due(frame[4]) {
            Some(Trouble::Cut) => return,
            Some(Trouble::CutAndClose) => {
                shared.closed.store(true, Ordering::SeqCst);
                return;
            }
            Some(Trouble::CutInside) => {
                let _ = to.write_all(&frame[..frame.len() / 2]);
                return;
            }
            Some(Trouble::Silence) => silent.store(true, Ordering::SeqCst),
            None if to.write_all(&frame).is_err() => return,
            None => {}
        }
    }
}

impl Shared {
    /// The trouble that comes with a frame of this type, if it is the one that was counted for.
    fn due(&self, frame_type: u8) -> Option<Trouble> {
        let mut plan = self.plan.lock().expect("no holder panics");
        let position = plan.iter().position(|planned| planned.frame_type == frame_type)?;
        plan[position].nth -= 1;
        (plan[position].nth == 0).then(|| plan.remove(position).trouble)
    }
}
