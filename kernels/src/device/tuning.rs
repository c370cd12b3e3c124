//! Autotuning results of a GPU, kept from one run to the next.

/// Keeps autotuning results (the fastest kernels for each size) and compiled kernels in `folder`,
/// so that the next run need not repeat the work, and tries few kernels unless
/// `CUBECL_AUTOTUNE_LEVEL` asks for more; in a `cubecl.toml`, `balanced` is taken for the default
/// that it is. Must be called before the first use of a GPU.
#[cfg(feature = "cube")]
pub fn set_tuning_cache(folder: &std::path::Path) {
    use cubecl::config::autotune::AutotuneLevel;
    use cubecl::config::cache::CacheConfig;
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
    let mut config = CubeClRuntimeConfig::from_current_dir();
    // The default compiles many kernels for each size, and one can take NVIDIA's compiler two
    // minutes.
    if matches!(config.autotune.level, AutotuneLevel::Balanced) {
        config.autotune.level = AutotuneLevel::Minimal;
    }
    config = config.override_from_env();
    config.environment.path = CacheConfig::Directory(folder.to_path_buf());
    config.compilation.cache = true;
    // Without effect if a GPU has been used before: the configuration is then already set.
    CubeClRuntimeConfig::try_set(config);
}

/// Does nothing, because this build has no GPU support.
#[cfg(not(feature = "cube"))]
pub fn set_tuning_cache(_: &std::path::Path) {}
