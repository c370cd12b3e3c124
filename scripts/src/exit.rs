//! Exit codes: 0 done · 1 a check has failed · 2 configuration · 3 data · 74 standard output cannot
//! be written · 78 not finite · 101 a bug · 134 lost peer or deadline · 143 preempted, checkpoint
//! written.
//!
//! A path that does not exist was misspelled in a flag or a recipe: configuration. A file that exists
//! and cannot be used is data, and so is one that disappears during a run.

use std::io;

use curate::CurateError;
use eval::EvalError;
use networks::NetworkError;
use pipeline::PipelineError;
use prep::PrepError;
use ranks::EngineError;
use report::ReportError;
use session::SessionError;
use trainer::TrainError;
use weights::WeightsError;

/// A check has failed.
pub(crate) const CHECK_FAILED: u8 = 1;
/// The recipe, the flags or the work directory are invalid, or name what does not exist.
pub(crate) const CONFIGURATION: u8 = 2;
/// The shards, the disk or a checkpoint have a defect.
pub(crate) const DATA: u8 = 3;
/// Standard output is a closed pipe or a full disk.
pub(crate) const OUTPUT_LOST: u8 = 74;
/// Loss or gradients were not finite too often.
const NOT_FINITE: u8 = 78;
/// The program has panicked.
pub(crate) const BUG: u8 = 101;
/// Another rank has ended or does not respond.
const LOST_PEER: u8 = 134;
/// A signal asked the run to stop; a checkpoint is written.
pub(crate) const PREEMPTED: u8 = 143;

/// Returns the exit code for `error`.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    let code = error.chain().find_map(|cause| {
        let code = cause.downcast_ref::<SessionError>().map(session_code);
        code.or_else(|| cause.downcast_ref::<PrepError>().map(prep_code))
            .or_else(|| cause.downcast_ref::<TrainError>().map(train_code))
            .or_else(|| cause.downcast_ref::<PipelineError>().map(pipeline_code))
            .or_else(|| cause.downcast_ref::<EngineError>().map(engine_code))
            .or_else(|| cause.downcast_ref::<WeightsError>().map(weights_code))
            .or_else(|| cause.downcast_ref::<ReportError>().map(report_code))
            .or_else(|| cause.downcast_ref::<CurateError>().map(curate_code))
            .or_else(|| cause.downcast_ref::<EvalError>().map(eval_code))
            .or_else(|| cause.downcast_ref::<io::Error>().map(file_code))
            .or_else(|| cause.is::<csv::Error>().then_some(DATA))
    });
    // Errors without a type come from the flags.
    code.unwrap_or(CONFIGURATION)
}

/// Returns the code for a file that cannot be read or written.
fn file_code(error: &io::Error) -> u8 {
    match error.kind() {
        io::ErrorKind::NotFound => CONFIGURATION,
        _ => DATA,
    }
}

fn session_code(error: &SessionError) -> u8 {
    match error {
        SessionError::Io { source, .. }
        | SessionError::FileSystem { source, .. }
        | SessionError::NotDownloaded { source, .. }
        | SessionError::CheckpointRemoved { source, .. } => file_code(source),
        SessionError::Ranks(error) | SessionError::Fabric { source: error, .. } => engine_code(error),
        SessionError::Prep(error) => prep_code(error),
        SessionError::Data(error) => pipeline_code(error),
        SessionError::Weights(error) => weights_code(error),
        SessionError::Train(error) => train_code(error),
        SessionError::Eval(error) => eval_code(error),
        SessionError::InitialHeads { source } => session_code(source),
        SessionError::FabricWrong { .. } => CHECK_FAILED,
        SessionError::FabricPanicked => BUG,
        SessionError::UnusableImages { .. } | SessionError::ForkCopy { .. } => DATA,
        SessionError::NoShards
        | SessionError::NoChoice
        | SessionError::RemoteShards
        | SessionError::NoHeads { .. }
        | SessionError::NoBackbone
        | SessionError::NoInitialWeights { .. }
        | SessionError::BeganWithWeights { .. }
        | SessionError::BeganWithHeads { .. }
        | SessionError::BeganWithNetwork { .. }
        | SessionError::InitialClasses { .. }
        | SessionError::DoesNotFit { .. }
        | SessionError::OtherWeights { .. }
        | SessionError::ForkNotStarted { .. }
        | SessionError::ForkOccupied { .. }
        | SessionError::ForkFinished { .. }
        | SessionError::ForkChannels { .. }
        | SessionError::ForkPositions { .. }
        | SessionError::FrozenUnnamed { .. }
        | SessionError::Frozen { .. }
        | SessionError::FrozenDepth { .. }
        | SessionError::FrozenChanged { .. }
        | SessionError::Sources { .. }
        | SessionError::ImageWeight { .. }
        | SessionError::NoImageWeights { .. }
        | SessionError::NoClasses { .. }
        | SessionError::SeveralClasses { .. }
        | SessionError::OneClass { .. }
        | SessionError::UnlistedClasses { .. }
        | SessionError::UnusedClasses { .. }
        | SessionError::UnknownClasses { .. }
        | SessionError::NothingHeldOut { .. }
        | SessionError::LabelsChanged { .. }
        | SessionError::NotClassifier { .. }
        | SessionError::NoClassifier { .. }
        | SessionError::UnlistedPixelClass { .. }
        | SessionError::MasksChanged { .. }
        | SessionError::NotSegmenter { .. }
        | SessionError::NoDecoder { .. }
        | SessionError::PixelSettings { .. }
        | SessionError::DeviceType { .. }
        | SessionError::Groups { .. }
        | SessionError::Minutes { .. }
        | SessionError::Kernels { .. }
        | SessionError::Json { .. }
        | SessionError::Unserializable(_)
        | SessionError::RunValues { .. }
        | SessionError::NoDataFormat { .. }
        | SessionError::FloatBits
        | SessionError::Transform { .. }
        | SessionError::ImageMemory { .. }
        | SessionError::NoRun { .. }
        | SessionError::Network(_)
        | SessionError::Launch(_)
        | SessionError::Device(_) => CONFIGURATION,
    }
}

fn prep_code(error: &PrepError) -> u8 {
    match error {
        PrepError::Data(error) => pipeline_code(error),
        PrepError::Io { source, .. } | PrepError::FileSystem { source, .. } => file_code(source),
        PrepError::Walk { .. } | PrepError::Table { .. } | PrepError::Client(_) => DATA,
        PrepError::WorkDirectory { .. }
        | PrepError::Line { .. }
        | PrepError::TooManyClasses { .. }
        | PrepError::Missing { .. }
        | PrepError::NotImages { .. }
        | PrepError::NotRegular { .. }
        | PrepError::NoColumn { .. }
        | PrepError::NoImageColumn { .. }
        | PrepError::EmptyColumn { .. }
        | PrepError::SeveralValues { .. }
        | PrepError::Json { .. }
        | PrepError::Unserializable(_)
        | PrepError::TooDistant { .. }
        | PrepError::Busy { .. }
        | PrepError::OverwrittenParts
        | PrepError::MissingParts { .. }
        | PrepError::DamagedPart { .. }
        | PrepError::OtherPart { .. }
        | PrepError::NoResultFolder
        | PrepError::ResultFolder
        | PrepError::PartsOfOtherShards { .. }
        | PrepError::UndividedFolder { .. }
        | PrepError::OtherJob { .. }
        | PrepError::OtherShards { .. }
        | PrepError::OtherPack { .. }
        | PrepError::PackBegun { .. }
        | PrepError::InOutput { .. }
        | PrepError::OutputInFolder { .. }
        | PrepError::CopiesInFolder { .. }
        | PrepError::NoPreferred { .. }
        | PrepError::SameNames { .. }
        | PrepError::RepeatedKey { .. }
        | PrepError::BadShare { .. }
        | PrepError::RepeatedShare { .. }
        | PrepError::BadPrefix { .. }
        | PrepError::NoneSelected
        | PrepError::MissingClasses { .. }
        | PrepError::MissingKeys { .. }
        | PrepError::FileExists { .. }
        | PrepError::NotUrls { .. }
        | PrepError::NoUrls { .. }
        | PrepError::OtherClassList { .. }
        | PrepError::ClassLists { .. }
        | PrepError::OtherClasses { .. }
        | PrepError::UnknownClass { .. }
        | PrepError::NotNumber { .. }
        | PrepError::NoImageExtension { .. }
        | PrepError::NotReadable { .. }
        | PrepError::Undecodable { .. }
        | PrepError::Unencodable { .. }
        | PrepError::Jpeg(_)
        | PrepError::Png(_)
        | PrepError::Augment(_) => CONFIGURATION,
    }
}

fn eval_code(error: &EvalError) -> u8 {
    match error {
        EvalError::Data(error) => pipeline_code(error),
        EvalError::Prep(error) => prep_code(error),
        EvalError::Io { source, .. } => file_code(source),
        EvalError::NoFiles { .. }
        | EvalError::Exists { .. }
        | EvalError::TooManyParts { .. }
        | EvalError::NoParts
        | EvalError::NoColumns { .. }
        | EvalError::OtherRow { .. }
        | EvalError::OtherFeatures { .. }
        | EvalError::ImageSize { .. }
        | EvalError::ImagesRequired { .. }
        | EvalError::TooFewImages { .. }
        | EvalError::SeveralClasses { .. }
        | EvalError::MixedInputs { .. } => CONFIGURATION,
        EvalError::NotFinite { .. } => NOT_FINITE,
        EvalError::Network(NetworkError::Weights { .. })
        | EvalError::NoLabels { .. }
        | EvalError::ClassNames { .. }
        | EvalError::NoImages { .. }
        | EvalError::NoMasks { .. }
        | EvalError::Mask { .. }
        | EvalError::OneClass { .. }
        | EvalError::Read { .. }
        | EvalError::Write { .. } => DATA,
    }
}

fn curate_code(error: &CurateError) -> u8 {
    match error {
        CurateError::Ranks(error) => engine_code(error),
        CurateError::Eval(error) => eval_code(error),
        CurateError::Prep(error) => prep_code(error),
        CurateError::Data(error) => pipeline_code(error),
        CurateError::Io { source, .. } => file_code(source),
        CurateError::TooManyClusters { .. }
        | CurateError::NoClusters
        | CurateError::Levels { .. }
        | CurateError::LevelValues { .. }
        | CurateError::Memory { .. }
        | CurateError::DamagedClusters { .. }
        | CurateError::OtherClusters { .. }
        | CurateError::Widths { .. }
        | CurateError::OtherComputation { .. }
        | CurateError::NoFeatures
        | CurateError::FileWidths { .. }
        | CurateError::FileComputation { .. }
        | CurateError::TooManyRows { .. }
        | CurateError::UnknownImage { .. }
        | CurateError::AmbiguousImage { .. }
        | CurateError::PackWithoutImages
        | CurateError::NothingKept
        | CurateError::UserFile { .. }
        | CurateError::NoList { .. }
        | CurateError::NoGroups { .. }
        | CurateError::NoneListed { .. }
        | CurateError::NoLevel { .. } => CONFIGURATION,
        CurateError::Shape { .. } | CurateError::NotFinite { .. } | CurateError::PeersFailed { .. } => DATA,
    }
}

fn train_code(error: &TrainError) -> u8 {
    match error {
        TrainError::Recipe { .. }
        | TrainError::RecipeMismatch { .. }
        | TrainError::OtherMethod { .. }
        | TrainError::DataMismatch { .. }
        | TrainError::ViewsMismatch { .. }
        | TrainError::RanksDiffer { .. }
        | TrainError::Busy { .. }
        | TrainError::NoRun { .. }
        | TrainError::NoKey { .. }
        | TrainError::NoTemplate { .. }
        | TrainError::ModelSection { .. }
        | TrainError::UnknownPreset { .. }
        | TrainError::PresetUnits { .. }
        | TrainError::NoFigures { .. }
        | TrainError::Augment(_) => CONFIGURATION,
        TrainError::Ranks(error) => engine_code(error),
        TrainError::NotFinite { .. } => NOT_FINITE,
        TrainError::WrongProduct { .. } => CHECK_FAILED,
        // The shard existed when the run began.
        TrainError::Data(PipelineError::MissingShard { .. }) => DATA,
        TrainError::Data(error) => pipeline_code(error),
        TrainError::Io { .. }
        | TrainError::CheckpointWrite { .. }
        | TrainError::CheckpointRead { .. }
        | TrainError::Probe { .. }
        | TrainError::PeersFailed { .. }
        | TrainError::NoUnit { .. }
        | TrainError::WorkdirMissing { .. }
        | TrainError::Network(NetworkError::Weights { .. })
        | TrainError::DataEnded => DATA,
    }
}

fn report_code(error: &ReportError) -> u8 {
    match error {
        ReportError::Run(error) => train_code(error),
        ReportError::Eval(error) => eval_code(error),
        ReportError::Read { .. }
        | ReportError::Write { .. }
        | ReportError::Picture { .. }
        | ReportError::Encode(_) => DATA,
        ReportError::Record { .. }
        | ReportError::NoResponse { .. }
        | ReportError::Response(_)
        | ReportError::Refused { .. }
        | ReportError::Incomplete { .. } => CONFIGURATION,
    }
}

fn weights_code(error: &WeightsError) -> u8 {
    match error {
        WeightsError::Unsupported { .. } | WeightsError::Exists { .. } => CONFIGURATION,
        WeightsError::Io { source, .. } => file_code(source),
        WeightsError::Malformed { .. }
        | WeightsError::Unknown { .. }
        | WeightsError::Network(NetworkError::Weights { .. }) => DATA,
    }
}

fn engine_code(error: &EngineError) -> u8 {
    match error {
        EngineError::Unavailable { .. } => CONFIGURATION,
        EngineError::PeerFailed { .. } => DATA,
        EngineError::PeerLost { .. }
        | EngineError::Deadline { .. }
        | EngineError::Failed { .. }
        | EngineError::Device(_)
        | EngineError::Lengths { .. }
        | EngineError::Ended => LOST_PEER,
    }
}

fn pipeline_code(error: &PipelineError) -> u8 {
    match error {
        PipelineError::InvalidShardList { .. }
        | PipelineError::MissingShard { .. }
        | PipelineError::UnevenShare { .. }
        | PipelineError::Sampling { .. } => CONFIGURATION,
        _ => DATA,
    }
}

#[cfg(test)]
mod tests {
    use ranks::conformance::ConformanceError;

    use super::*;

    /// A failed check and a panic are no mistakes of the user.
    #[test]
    fn failed_checks_and_panics_have_codes_of_their_own() {
        let source =
            ConformanceError::Wrong { engine: "mpi", rank: 1, world_size: 2, operation: "reduce", n: 8 };
        let wrong = SessionError::FabricWrong { rank: 1, source };
        assert_eq!(exit_code(&wrong.into()), CHECK_FAILED);
        assert_eq!(exit_code(&SessionError::FabricPanicked.into()), BUG);
    }
}
