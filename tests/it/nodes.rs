//! Two nodes on this machine: network namespaces that a virtual cable joins. Requires root.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::mpirun::mpirun;

/// Two network namespaces, joined by a virtual cable. Their names hold the number of this process: several may exist.
pub(crate) struct Nodes {
    names: [String; 2],
}

impl Nodes {
    /// Creates both, or returns `None` and says so if this process may not.
    pub(crate) fn new() -> Option<Self> {
        use std::io::Write;
        let process = std::process::id();
        let nodes = Self { names: ["a", "b"].map(|node| format!("ocelli-{node}-{process}")) };
        let [a, b] = &nodes.names;
        let steps = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add cable-a netns {a} type veth peer name cable-b netns {b}"),
            format!("-n {a} addr add 10.77.0.1/24 dev cable-a"),
            format!("-n {b} addr add 10.77.0.2/24 dev cable-b"),
            format!("-n {a} link set cable-a up"),
            format!("-n {b} link set cable-b up"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
        ];
        let made = steps.iter().all(|step| Self::ip(step));
        if !made {
            let _ = writeln!(std::io::stderr(), "left out: two nodes; network namespaces need root");
        }
        made.then_some(nodes)
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
        std::fs::write(&agent, format!("#!/bin/bash\nshift\n{} \"$*\"\n", Self::inside(b))).unwrap();
        Command::new("chmod").args(["+x", &agent.display().to_string()]).status().unwrap();
        let inner = mpirun(2 * n_each, folder, args);
        let mut command = Command::new("bash");
        command
            .args(["-c", &format!("{} 'exec \"$0\" \"$@\"' \"$@\"", Self::inside(a)), "bash", "mpirun"])
            .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
            .args(["--host", &format!("10.77.0.1:{n_each},10.77.0.2:{n_each}")])
            .args(["--mca", "plm_rsh_agent", &agent.display().to_string()])
            // Shared memory within a node, the cable between them.
            .args(["--mca", "btl", "tcp,vader,self", "--mca", "btl_tcp_if_include", "10.77.0.0/24"])
            .args(["--mca", "oob_tcp_if_include", "10.77.0.0/24"])
            .args(inner.get_args())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// Returns the beginning of a line of a shell that runs a command within node `name`, which has a host name and shared memory of
    /// its own.
    fn inside(name: &str) -> String {
        format!(
            "exec ip netns exec {name} unshare --uts --mount sh -c 'hostname {name}; mount -t tmpfs tmpfs /dev/shm; \
             exec sh -c \"$0\" \"$@\"'"
        )
    }

    /// Cuts the cable.
    pub(crate) fn cut(&self) {
        assert!(Self::ip(&format!("-n {} link set cable-b down", self.names[1])));
    }

    /// Joins a cable that was cut.
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
