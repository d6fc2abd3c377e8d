// Which charts the page has, in order. A chart whose metrics the run lacks is not shown.
"use strict";
(() => {
  const has = (name) => name in R.data.series.columns;
  const matching = (pattern) => Object.keys(R.data.series.columns).filter((name) => pattern.test(name));
  const same = (a, b) => has(a) && has(b) && JSON.stringify(R.data.series.columns[a]) === JSON.stringify(R.data.series.columns[b]);
  const anyAbove = (name) => has(name) && R.data.series.columns[name].some((v) => v !== null && v !== 0);

  const valLabel = (name) => name.replace(/^val-(core|aux)\//, "").replace(/\/(mean)$/, "");

  const main = () => {
    const series = [{ name: "critic/score/mean", label: "mean score" }];
    if (!same("critic/score/mean", "critic/rewards/mean")) series.push({ name: "critic/rewards/mean", label: "reward with KL" });
    if (R.data.accuracy && R.data.accuracy !== "val/loss") {
      series.push({ name: R.data.accuracy, label: R.data.accuracyLabel.toLowerCase(), sparse: true });
    }
    return { id: "reward", title: series.length > 1 && series.at(-1).sparse ? "Reward and " + series.at(-1).label : "Reward", wide: true, series };
  };

  const validation = () => {
    const names = matching(/^val-core\//).filter((n) => n !== R.data.accuracy && !same(n, R.data.accuracy || "")).slice(0, 8);
    return { id: "validation", title: "Validation in detail", series: names.map((name) => ({ name, label: valLabel(name), sparse: true })) };
  };

  const TIMING = [["gen", "sampling"], ["reward", "reward"], ["old_log_prob", "old log-probs"], ["ref", "reference"],
    ["values", "values"], ["adv", "advantages"], ["update_critic", "update critic"], ["update_actor", "update actor"],
    ["update_weights", "weight sync"], ["testing", "validation"], ["save_checkpoint", "save"]];

  R.chartList = () => [
    main(),
    { id: "loss", title: "Loss", wide: true, series: [{ name: "train/loss", label: "training" }, { name: "val/loss", label: "validation", sparse: true }] },
    validation(),
    { id: "length", title: "Response length", unit: "tokens", series: [
      { name: "response_length/mean", label: "mean" }, { name: "response_length/max", label: "longest" },
      { name: "response_length/clip_ratio", label: "share cut off", right: true }] },
    { id: "kl", title: "KL divergence", unit: "nats", series: [
      { name: "actor/ppo_kl", label: "old to new" }, { name: "actor/kl_loss", label: "to reference" },
      { name: "actor/reward_kl_penalty", label: "penalty in reward" }] },
    { id: "entropy", title: "Entropy", unit: "nats per token", series: [{ name: "actor/entropy", label: "policy" }] },
    { id: "clip", title: "Clip fractions", unit: "share of tokens", series: [
      { name: "actor/pg_clipfrac", label: "clipped" }, { name: "actor/pg_clipfrac_lower", label: "clipped below (dual)" },
      { name: "critic/vf_clipfrac", label: "values" }] },
    { id: "grad", title: "Gradient norm and learning rate", series: [
      { name: has("actor/grad_norm") ? "actor/grad_norm" : "train/grad_norm", label: "gradient norm" },
      { name: has("actor/lr") ? "actor/lr" : "train/lr", label: "learning rate", right: true, raw: true }] },
    { id: "policy", title: "Policy loss", series: [{ name: "actor/pg_loss", label: "policy term" }] },
    { id: "critic", title: "Critic", series: [
      { name: "critic/vf_loss", label: "value loss" }, { name: "critic/vf_explained_var", label: "explained variance", right: true }] },
    { id: "extra", title: "Reward parts", series: matching(/^reward_extra\/.+\/mean$/).slice(0, 8).map((name) => (
      { name, label: name.replace(/^reward_extra\//, "").replace(/\/mean$/, "") })) },
    { id: "errors", title: "Scoring that failed", unit: "responses", series: ["reward/errors", "reward/timeouts"].filter(anyAbove)
      .map((name) => ({ name, label: name.slice(7), raw: true })) },
    { id: "ends", title: "How trajectories end", unit: "share of trajectories", series: matching(/^agent\/status\//).filter(anyAbove)
      .map((name) => ({ name, label: name.slice(13).replaceAll("_", " "), raw: true })) },
    { id: "sampler", title: "Sampler against trainer", unit: "|difference of log-probs|", log: true, series: [
      { name: "training/rollout_logprob_abs_diff/mean", label: "mean" }, { name: "training/rollout_logprob_abs_diff/p99", label: "99th percentile" },
      { name: "training/rollout_logprob_abs_diff/max", label: "largest" }] },
    { id: "probs", title: "Sampler against trainer", unit: "|difference of probabilities|", log: true, series: [
      { name: "training/rollout_probs_diff_mean", label: "mean" }, { name: "training/rollout_probs_diff_max", label: "largest" }] },
    { id: "stale", title: "Staleness", unit: "weight versions behind", series: [["staleness", "mean", "newest token, mean"],
      ["staleness_worst", "mean", "oldest token, mean"], ["staleness_worst", "max", "oldest token, largest"]]
      .map(([what, k, label]) => ({ name: `training/off_policy/trajectory_${what}/${k}`, label })).filter((s) => anyAbove(s.name)) },
    { id: "filter", title: "Groups without signal", unit: "groups", series: ["training/filter_groups/evicted_samples", "training/dropped_groups"]
      .filter(anyAbove).map((name) => ({ name, label: name.includes("evicted") ? "filtered out" : "too few scores" })) },
    { id: "timing", title: "Where the time goes", unit: "seconds per step", wide: true, stack: "timing_s/step",
      series: TIMING.map(([key, label]) => ({ name: "timing_s/" + key, label })) },
    { id: "traintime", title: "Step time", unit: "seconds", series: [{ name: "train/time", label: "step" }] },
    { id: "throughput", title: "Throughput", unit: "tokens per second and device", zero: true, series: [
      { name: "perf/throughput", label: "tokens/s" }, { name: "perf/device_busy_ratio", label: "share busy", right: true }] },
    { id: "sync", title: "Weights to the samplers", unit: "GB/s", zero: true, series: !anyAbove("perf/weight_sync_gb_per_s") ? [] : [
      { name: "perf/weight_sync_gb_per_s", label: "GB/s" }, { name: "timing_s/update_weights", label: "seconds", right: true }] },
    { id: "memory", title: "Memory", unit: "GiB", zero: true, series: [
      { name: "perf/max_memory_allocated_gb", label: "device, allocated" }, { name: "perf/max_memory_reserved_gb", label: "device, reserved" },
      { name: "perf/cpu_memory_used_gb", label: "host" }] },
  ].map((chart) => ({ ...chart, series: chart.series.filter((s) => has(s.name)) })).filter((chart) => chart.series.length);
})();
