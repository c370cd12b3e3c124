//! Settings of the MPI library, which reads them from the environment when it is started.

/// Open MPI's number of TCP connections between two processes.
const CONNECTIONS_VARIABLE: &str = "OMPI_MCA_btl_tcp_links";

/// Makes Open MPI open two TCP connections between two ranks, unless the environment says how many.
/// Must be called before any thread is started.
///
/// A rank sends a long message only after the receiver has agreed to it. Over one connection, the
/// agreement for one direction waits behind the message of the other, and both directions together
/// reach half of a cable's bandwidth. `docs/ranks.md` has measurements: two connections take about
/// half the time on cables of up to 2 Gbit/s, and up to a third longer where the processors limit
/// the rate. Other fabrics and libraries ignore the variable.
pub(crate) fn open_two_connections() {
    if std::env::var_os(CONNECTIONS_VARIABLE).is_none() {
        // SAFETY: no other thread runs yet, and so none reads the environment.
        #[allow(unsafe_code)]
        unsafe {
            std::env::set_var(CONNECTIONS_VARIABLE, "2");
        }
    }
}
