//! Two nodes on this machine: network namespaces connected by a virtual cable. Requires root.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::mpirun::mpirun;

/// Two network namespaces, connected by a virtual cable. Their names contain the number of this
/// process, so that several pairs may exist.
pub(crate) struct Nodes {
    names: [String; 2],
    /// Process that delays and drops packets, if the cable has a delay or a loss.
    relay: Option<Relay>,
}

/// Number of pairs that this process has created.
static N_CREATED: AtomicUsize = AtomicUsize::new(0);

/// Process that runs `relay.py`.
struct Relay(Child);

impl Relay {
    fn start(names: &[String; 2], cable: Cable) -> Option<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/it/relay.py");
        let numbers = [cable.delay_ms.to_string(), cable.loss.to_string()];
        let mut command = Command::new("python3");
        command.arg(script).args(names).args(numbers).stdout(Stdio::piped());
        let mut child = command.spawn().ok()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take()?).read_line(&mut line).ok()?;
        let relay = Self(child);
        (line == "ready\n").then_some(relay)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        drop((self.0.kill(), self.0.wait()));
    }
}

/// Properties of a cable.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cable {
    /// Largest rate in each direction, in megabits per second; 0 for any.
    pub(crate) megabits_per_s: u32,
    /// Time that a packet takes from one node to the other, in milliseconds.
    pub(crate) delay_ms: f64,
    /// Share of the packets that are lost.
    pub(crate) loss: f64,
}

impl Cable {
    /// A cable that only the machine limits.
    pub(crate) const FAST: Self = Self { megabits_per_s: 0, delay_ms: 0.0, loss: 0.0 };
}

impl Nodes {
    /// Creates both nodes with a fast cable, or prints a message and returns `None` if this process
    /// lacks the privileges.
    pub(crate) fn new() -> Option<Self> {
        Self::with_cable(Cable::FAST)
    }

    /// Creates both nodes with `cable`, or prints a message and returns `None` if this process
    /// lacks the privileges.
    pub(crate) fn with_cable(cable: Cable) -> Option<Self> {
        use std::io::Write;
        let number = N_CREATED.fetch_add(1, Ordering::Relaxed);
        let process = std::process::id();
        let names = ["a", "b"].map(|node| format!("ocelli-{node}-{process}-{number}"));
        let mut nodes = Self { names, relay: None };
        let have_namespaces = nodes.names.iter().all(|name| Self::ip(&format!("netns add {name}")));
        let is_connected = have_namespaces && nodes.connect(cable);
        if !is_connected {
            let _ = writeln!(
                std::io::stderr(),
                "left out: two nodes; network namespaces need root, their cables tc and Python"
            );
        }
        is_connected.then_some(nodes)
    }

    /// Connects the nodes by `cable`; returns `true` on success.
    fn connect(&mut self, cable: Cable) -> bool {
        let [a, b] = &self.names;
        let is_direct = cable.delay_ms == 0.0 && cable.loss == 0.0;
        if is_direct {
            let ends = format!("link add cable-a netns {a} type veth peer name cable-b netns {b}");
            if !Self::ip(&ends) {
                return false;
            }
        } else {
            self.relay = Relay::start(&self.names, cable);
            if self.relay.is_none() {
                return false;
            }
        }
        for (name, end, address) in [(a, "cable-a", "10.77.0.1/24"), (b, "cable-b", "10.77.0.2/24")] {
            let is_limited = cable.megabits_per_s == 0 || Self::limit(name, end, cable.megabits_per_s);
            // Large packets, so that their transfer needs little of the CPU.
            let is_up = Self::ip(&format!("-n {name} addr add {address} dev {end}"))
                && Self::ip(&format!("-n {name} link set {end} mtu 9000 up"))
                && Self::ip(&format!("-n {name} link set lo up"));
            if !is_limited || !is_up {
                return false;
            }
        }
        true
    }

    /// Limits the rate of a node into its end of the cable to `megabits_per_s`.
    fn limit(name: &str, end: &str, megabits_per_s: u32) -> bool {
        let queue = format!("{end} root tbf rate {megabits_per_s}mbit burst 32kb latency 20ms");
        let mut command = Command::new("tc");
        command.args(["-n", name, "qdisc", "replace", "dev"]).args(queue.split(' ')).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    /// Changes the largest rate of the cable in each direction.
    pub(crate) fn set_rate(&self, megabits_per_s: u32) {
        let mut ends = self.names.iter().zip(["cable-a", "cable-b"]);
        assert!(ends.all(|(name, end)| Self::limit(name, end, megabits_per_s)));
    }

    /// Stalls a cable that has a delay, or resumes its transfer: packets wait until the next call,
    /// and none is lost.
    pub(crate) fn stall(&self) {
        let relay = self.relay.as_ref().unwrap();
        Command::new("kill").args(["-USR1", &relay.0.id().to_string()]).status().unwrap();
    }

    fn ip(arguments: &str) -> bool {
        let mut command = Command::new("ip");
        command.args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    /// Prepares the program's `args` on `n_each` ranks of each node, as [`mpirun`] does on one.
    pub(crate) fn mpirun(&self, n_each: usize, folder: &Path, args: &[String]) -> Command {
        let [a, b] = &self.names;
        let agent = folder.join("agent.sh");
        std::fs::write(&agent, format!("#!/bin/bash\nshift\n{} \"$*\"\n", Self::shell_prefix(b))).unwrap();
        Command::new("chmod").args(["+x", &agent.display().to_string()]).status().unwrap();
        let local = mpirun(2 * n_each, folder, args);
        let mut command = Command::new("bash");
        command
            .args(["-c", &format!("{} 'exec \"$0\" \"$@\"' \"$@\"", Self::shell_prefix(a)), "bash", "mpirun"])
            .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
            .args(["--host", &format!("10.77.0.1:{n_each},10.77.0.2:{n_each}")])
            .args(["--mca", "plm_rsh_agent", &agent.display().to_string()])
            // Shared memory within a node, the cable between the nodes.
            .args(["--mca", "btl", "tcp,vader,self", "--mca", "btl_tcp_if_include", "10.77.0.0/24"])
            .args(["--mca", "oob_tcp_if_include", "10.77.0.0/24"])
            .args(local.get_args())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// Returns the start of a shell command line that runs a command on node `name`, with its own
    /// host name and shared memory.
    fn shell_prefix(name: &str) -> String {
        format!(
            "exec ip netns exec {name} unshare --uts --mount sh -c 'hostname {name}; mount -t tmpfs tmpfs \
             /dev/shm; exec sh -c \"$0\" \"$@\"'"
        )
    }

    /// Counts the TCP connections between both nodes.
    pub(crate) fn n_connections(&self) -> usize {
        let table = Command::new("ip")
            .args(["netns", "exec", &self.names[0], "cat", "/proc/net/tcp"])
            .output()
            .unwrap();
        // Addresses are hexadecimal, the last number first; 01 is an established connection.
        String::from_utf8(table.stdout)
            .unwrap()
            .lines()
            .filter(|line| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                fields[1].starts_with("01004D0A:") && fields[2].starts_with("02004D0A:") && fields[3] == "01"
            })
            .count()
    }

    /// Cuts the cable.
    pub(crate) fn cut(&self) {
        assert!(Self::ip(&format!("-n {} link set cable-b down", self.names[1])));
    }

    /// Reconnects a cable that was cut.
    pub(crate) fn mend(&self) {
        assert!(Self::ip(&format!("-n {} link set cable-b up", self.names[1])));
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for name in &self.names {
            Self::ip(&format!("netns del {name}"));
        }
    }
}
