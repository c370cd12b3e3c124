//! Lanes: the units of a cube that compute one row.

use cubecl::client::Client;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

/// Number of rows per cube.
const ROWS: u32 = 4;

/// Assignment of the units of a cube to rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Lanes {
    /// Number of units per row.
    pub(super) n: usize,
    /// Whether the units of a row are one plane, which has its own reductions.
    pub(super) planes: bool,
}

impl Lanes {
    /// Returns one plane per row if the device's planes have a single size and can be synchronized,
    /// because lanes run loops of unequal lengths before they reduce.
    pub(super) fn for_client(client: &Client) -> Self {
        let hardware = &client.properties().hardware;
        let has_single_size =
            hardware.plane_size_min == hardware.plane_size_max && hardware.plane_size_min > 1;
        let features = &client.properties().features.plane;
        if features.contains(Plane::Ops) && features.contains(Plane::Sync) && has_single_size {
            Self { n: hardware.plane_size_max as usize, planes: true }
        } else {
            Self { n: 32, planes: false }
        }
    }

    /// Returns the dimensions of a cube: lanes × rows.
    pub(super) fn dim(self) -> CubeDim {
        CubeDim::new_2d(self.n as u32, ROWS)
    }

    /// Returns the number of cubes for `n_rows` rows.
    pub(super) fn n_cubes(n_rows: usize) -> usize {
        n_rows.div_ceil(ROWS as usize)
    }
}

/// Returns the row of this unit.
#[cube]
pub(super) fn row() -> usize {
    CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize
}

/// Returns the sum over the lanes of a row to all of them. All units of a cube must call it.
#[cube]
pub(super) fn sum(value: f32, #[comptime] lanes: Lanes) -> f32 {
    if comptime!(lanes.planes) {
        sync_plane();
        plane_sum(value)
    } else {
        let shared = to_shared_memory(value, lanes);
        let mut total = 0.0f32;
        for lane in 0..comptime!(lanes.n) {
            total += shared[UNIT_POS_Y as usize * comptime!(lanes.n) + lane];
        }
        sync_cube();
        total
    }
}

/// Returns the largest value over the lanes of a row to all of them. All units of a cube must call
/// it.
#[cube]
pub(super) fn largest(value: f32, #[comptime] lanes: Lanes) -> f32 {
    if comptime!(lanes.planes) {
        sync_plane();
        plane_max(value)
    } else {
        let shared = to_shared_memory(value, lanes);
        let mut best = shared[UNIT_POS_Y as usize * comptime!(lanes.n)];
        for lane in 1..comptime!(lanes.n) {
            best = max(best, shared[UNIT_POS_Y as usize * comptime!(lanes.n) + lane]);
        }
        sync_cube();
        best
    }
}

/// Returns the values of all units of the cube in shared memory.
#[cube]
fn to_shared_memory(value: f32, #[comptime] lanes: Lanes) -> Shared<[f32]> {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(lanes.n * ROWS as usize));
    shared[UNIT_POS as usize] = value;
    sync_cube();
    shared
}
