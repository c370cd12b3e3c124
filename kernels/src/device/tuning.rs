//! Cache of a GPU's autotuning results between runs.

/// Caches autotuning results (the fastest kernels for each size) and compiled kernels in `folder`,
/// so that the next run does not repeat the work. Few kernels are tried unless
/// `CUBECL_AUTOTUNE_LEVEL` asks for more; the level `balanced` in a `cubecl.toml` cannot be
/// distinguished from the default, and is replaced as well. Must be called before the first use of
/// a GPU.
#[cfg(feature = "cube")]
pub fn set_tuning_cache(folder: &std::path::Path) {
    use cubecl::config::autotune::AutotuneLevel;
    use cubecl::config::cache::CacheConfig;
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
    let mut config = CubeClRuntimeConfig::from_current_dir();
    // The default compiles many kernels for each size, and NVIDIA's compiler can take two minutes
    // for one.
    if matches!(config.autotune.level, AutotuneLevel::Balanced) {
        config.autotune.level = AutotuneLevel::Minimal;
    }
    config = config.override_from_env();
    config.environment.path = CacheConfig::Directory(folder.to_path_buf());
    config.compilation.cache = true;
    // Has no effect after the first use of a GPU, which sets the configuration.
    CubeClRuntimeConfig::try_set(config);
}

/// Does nothing, because this build has no GPU support.
#[cfg(not(feature = "cube"))]
pub fn set_tuning_cache(_: &std::path::Path) {}
