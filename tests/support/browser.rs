//! A real Chromium without a window, driven over its DevTools protocol.
//!
//! The protocol goes through a pipe, one JSON object after the other with a NUL behind each: no port is opened, and
//! when the test ends, the pipe does.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::skipped::skip;
use super::{PATIENCE, packages, wait_for};

/// A browser starts slowly where many tests run beside it.
const START_PATIENCE: Duration = PATIENCE.saturating_mul(3);

/// How the page is looked at.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pub width: u32,
    pub height: u32,
    pub dark: bool,
}

/// A browser with one page; it ends with its test, and its processes with it.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    pipe: ChildStdin,
    messages: Receiver<Value>,
    asked: u64,
    session: Option<String>,
    /// The events of the page since it was opened, in order.
    events: Vec<Value>,
    _profile: TempDir,
}

impl Browser {
    /// Starts it. Without a Chromium on this machine, reports the test as skipped.
    pub fn start() -> Option<Browser> {
        Browser::start_with(&[])
    }

    /// Starts it with more flags.
    pub fn start_with(flags: &[&str]) -> Option<Browser> {
        let Some(program) = packages::chromium() else {
            skip("the page in a browser: sudo apt-get install chromium");
            return None;
        };
        let profile = tempfile::tempdir().expect("a folder can be made");
        let mut child =
            Browser::command(&program, profile.path()).args(flags).spawn().expect("a shell can be started");
        let pipe = child.stdin.take().expect("stdin is piped");
        let messages = read_messages(child.stdout.take().expect("stdout is piped"));
        let (session, events) = (None, Vec::new());
        Some(Browser { child, pipe, messages, asked: 0, session, events, _profile: profile })
    }

    /// The shell gives the pipes the numbers on which Chromium reads and writes, 3 and 4.
    fn command(program: &Path, profile: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null", "sh"]).arg(program);
        command.args(["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage"]);
        command.args([
            "--no-first-run",
            "--disable-breakpad",
            "--disable-background-networking",
            "--no-proxy-server",
        ]);
        if rustix::process::geteuid().is_root() {
            // The sandbox needs a user that can be confined. The pages are our own.
            command.arg("--no-sandbox");
        }
        command.arg(format!("--user-data-dir={}", profile.display())).arg("about:blank");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
        command
    }

    /// Opens an address in a new page and waits until it is loaded.
    pub fn open(&mut self, address: &str, view: View) {
        self.session = None;
        let target = self.call("Target.createTarget", &json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        self.session = Some(self.call("Target.attachToTarget", &attach)["sessionId"].as_str().unwrap().to_owned());
        self.events.clear();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.call(&format!("{domain}.enable"), &json!({}));
        }
        self.call("Emulation.setScrollbarsHidden", &json!({"hidden": true}));
        self.look(view);
        self.call("Page.navigate", &json!({"url": address}));
        self.wait_until("document.readyState === 'complete'");
    }

    /// Looks at the page in another way.
    pub fn look(&mut self, view: View) {
        let View { width, height, dark } = view;
        let is_phone = width < 600;
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone});
        self.call("Emulation.setDeviceMetricsOverride", &metrics);
        let scheme = if dark { "dark" } else { "light" };
        let still = json!({"name": "prefers-reduced-motion", "value": "reduce"});
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}, still]});
        self.call("Emulation.setEmulatedMedia", &features);
    }

    /// The value of an expression in the page.
    #[track_caller]
    pub fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut answer = self.call("Runtime.evaluate", &asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].take()
    }

    /// Waits until an expression is true in the page.
    #[track_caller]
    pub fn wait_until(&mut self, expression: &str) {
        wait_for(expression, || (self.value(expression) == true).then_some(()));
    }

    /// Presses and releases the mouse in the middle of an element.
    pub fn click(&mut self, selector: &str) {
        let place = self.value(&format!(
            "(() => {{ const element = document.querySelector({selector:?}); element.scrollIntoView({{ block: 'center' }}); \
             const box = element.getBoundingClientRect(); \
             return [box.x + box.width / 2, box.y + box.height / 2]; }})()"
        ));
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", &event);
        }
    }

    /// Presses and releases a key.
    pub fn press(&mut self, key: &str, code: u32) {
        for kind in ["keyDown", "keyUp"] {
            let event = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", &event);
        }
    }

    /// Saves what is seen, the whole page, as a PNG; returns the picture.
    pub fn screenshot(&mut self, view: View, path: &Path) -> Vec<u8> {
        let height = self.value("document.documentElement.scrollHeight").as_u64().unwrap();
        self.look(View { height: u32::try_from(height).unwrap(), ..view });
        let answer = self.call("Page.captureScreenshot", &json!({"format": "png", "optimizeForSpeed": false}));
        let picture = base64::engine::general_purpose::STANDARD.decode(answer["data"].as_str().unwrap()).unwrap();
        self.look(view);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &picture).unwrap();
        picture
    }

    /// The pixels of a PNG, each of four bytes, row by row.
    pub fn pixels(&mut self, picture: &[u8]) -> Vec<u8> {
        let encoded = base64::engine::general_purpose::STANDARD.encode(picture);
        let answer = self.value(&format!(
            "(async () => {{ const image = new Image(); image.src = 'data:image/png;base64,{encoded}'; \
             await image.decode(); \
             const context = new OffscreenCanvas(image.width, image.height).getContext('2d'); \
             context.drawImage(image, 0, 0); \
             const {{ data }} = context.getImageData(0, 0, image.width, image.height); \
             const reader = new FileReader(); reader.readAsDataURL(new Blob([data])); \
             await new Promise((done) => {{ reader.onload = done; }}); \
             return reader.result.split(',')[1]; }})()"
        ));
        base64::engine::general_purpose::STANDARD.decode(answer.as_str().unwrap()).unwrap()
    }

    /// Errors and warnings of the page since it was opened: exceptions, the console, and what the browser refused it.
    pub fn complaints(&mut self) -> Vec<Value> {
        // The answer comes after all that happened before the question.
        self.value("0");
        let complains = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => {
                ["error", "warning"].iter().any(|kind| event["params"]["type"] == *kind)
            }
            Some("Log.entryAdded") => event["params"]["entry"]["level"] != "verbose",
            _ => false,
        };
        self.events.iter().filter(complains).cloned().collect()
    }

    /// The bodies of the last answers that the page got from an address, the latest first.
    pub fn answers(&mut self, address: &str, count: usize) -> Vec<String> {
        let is_from = |event: &&Value| {
            event["method"] == "Network.responseReceived" && event["params"]["response"]["url"] == address
        };
        let is_finished = |id: &Value| {
            self.events
                .iter()
                .any(|event| event["method"] == "Network.loadingFinished" && event["params"]["requestId"] == *id)
        };
        let received = self.events.iter().rev().filter(is_from).map(|event| event["params"]["requestId"].clone());
        let ids: Vec<Value> = received.filter(is_finished).take(count).collect();
        let body = |id: Value| self.call("Network.getResponseBody", &json!({"requestId": id}))["body"].take();
        ids.into_iter().map(body).map(|body| body.as_str().unwrap().to_owned()).collect()
    }

    #[track_caller]
    fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.asked += 1;
        let mut message = json!({"id": self.asked, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.pipe.write_all(format!("{message}\0").as_bytes()).expect("the browser reads");
        let deadline = Instant::now() + START_PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut message = self.messages.recv_timeout(left).unwrap_or_else(|error| panic!("{method}: {error}"));
            if message["id"] == self.asked {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].take();
            }
            if message["id"].is_null() && self.session.as_deref() == message["sessionId"].as_str() {
                self.events.push(message);
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its group has all of its processes; the shell became the first of them.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

fn read_messages(from: ChildStdout) -> Receiver<Value> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for bytes in BufReader::new(from).split(0).map_while(Result::ok) {
            let message = serde_json::from_slice(&bytes).expect("the browser writes JSON");
            if sender.send(message).is_err() {
                break;
            }
        }
    });
    receiver
}
