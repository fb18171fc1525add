"""Bugs that lose or spoil a run, injected one at a time, and the test that catches each.

`make seeded-bugs` copies the tree to a temporary folder, where the named tests must pass, injects
each bug there and expects its test to fail; it counts how many `make test` alone catches. It ends
with 1 if a bug is not caught or its source text no longer exists; test_seeded_bugs.py checks the
latter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

PARTS = (
    "app",
    "benchmarks",
    "common",
    "conf",
    "data_modules",
    "docs",
    "tests",
    "tools",
    "pyproject.toml",
    "Makefile",
)
"""files and folders of the tree that the tests need"""
PASSED, FAILED, NOTHING_SELECTED = 0, 1, 5
"""pytest's exit codes"""
UNKNOWN_NAME = 2
"""exit code if no bug's name contains a given word"""
COLLATOR = "data_modules/collator.py"
STORE = "app/training/checkpoint/store.py"
MODULE = "app/training/module.py"
RESUME = "app/training/checkpoint/state.py"
START = "app/run/start.py"
KILLED = "tests/training/checkpoint/test_store_killed.py"
ROTATION = "tests/training/checkpoint/test_checkpoint_store.py"
RESUMED = "tests/training/checkpoint/test_resume.py"
RESUMED_RUN = f"{RESUMED}::test_a_resumed_run_is_the_uninterrupted_one[lora packed]"
STEPS = "tests/parity/strategies/test_steps.py::test_lora_accumulated_and_clipped"
BAD_RESUME = "tests/bad_input/test_resume.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """A plausible mistake: a text that occurs once in a file, and its wrong replacement."""

    name: str
    file: str
    right: str
    wrong: str
    test: str
    """pytest id of a test that fails with the bug"""


BUGS = [
    Bug(
        name="a rank's random state is lost",
        file=RESUME,
        right="            restore_random_state(self._random_state, module.strategy.root_device)\n",
        wrong="            pass\n",
        test=RESUMED_RUN,
    ),
    Bug(
        name="rank 1 restores the random state of rank 0",
        file=RESUME,
        right="return None if is_new else strategy.data_rank * group + place",
        wrong="return None if is_new else 0",
        test="tests/end_to_end/test_signals.py::test_two_ranks_stop_together_and_are_restarted",
    ),
    Bug(
        name="resumed data skips one step",
        file="data_modules/packing.py",
        right="range(self._first_step, self._plan.num_steps)",
        wrong="range(self._first_step + (self._first_step > 0), self._plan.num_steps)",
        test=RESUMED_RUN,
    ),
    Bug(
        name="products add a gradient twice to those of earlier micro-batches",
        file="app/model/accumulation.py",
        right="weight.grad.addmm_(grad.T, rows)\n",
        wrong="weight.grad.addmm_(grad.T, rows, alpha=2)\n",
        test="tests/strategy/test_sharded.py::test_ranks_train_as_one[once]",
    ),
    Bug(
        name="resumed data skips one micro-batch of an accumulation",
        file="data_modules/packing.py",
        right="self._plan.micro_batches(step, self._rank)\n",
        wrong="self._plan.micro_batches(step, self._rank)[0 < step == self._first_step :]\n",
        test=RESUMED_RUN,
    ),
    Bug(
        name="a resumed run counts its steps from the next one",
        file="app/training/checkpoint/state.py",
        right="batches.update(dict.fromkeys(batches, step))",
        wrong="batches.update(dict.fromkeys(batches, step + 1))",
        test=RESUMED_RUN,
    ),
    Bug(
        name="the validation after the saved step is repeated",
        file="app/training/checkpoint/state.py",
        right="batches.update(dict.fromkeys(batches, step))",
        wrong="batches.update(dict.fromkeys(batches, step - 1))",
        test=RESUMED_RUN,
    ),
    Bug(
        name="the schedule restarts",
        file=RESUME,
        right="        restore_schedule(module.lr_schedulers(), source.step)\n",
        wrong="",
        test=RESUMED_RUN,
    ),
    Bug(
        name="a tensor of the optimizer state is lost",
        file="app/training/checkpoint/state.py",
        right="for full_name, value in tensors.items():",
        wrong="for full_name, value in list(tensors.items())[1:]:",
        test="tests/training/checkpoint/test_state.py"
        "::test_a_restored_training_goes_on_as_the_one_that_never_stopped[lora-fp32-adamw]",
    ),
    Bug(
        name="totals of a run count from its last start",
        file=MODULE,
        right='        self.metrics.load_state_dict(state["curves"])\n',
        wrong="",
        test=RESUMED_RUN,
    ),
    Bug(
        name="rows of metrics.csv are duplicated",
        file="app/training/loggers.py",
        right="            file.truncate(end)\n",
        wrong="            pass\n",
        test="tests/training/test_loggers.py::test_no_point_is_shown_twice",
    ),
    Bug(
        name="the marker is written first",
        file=STORE,
        right="""            written = disk.write_file(unfinished / MANIFEST, [text])
            disk.sync_folder(unfinished)
            faults.fault_point("ckpt:after_manifest", step)
            disk.write_file(unfinished / MARKER, [marker_of(written.sha256)])
""",
        wrong="""            import hashlib
            disk.write_file(unfinished / MARKER, [marker_of(hashlib.sha256(text).hexdigest())])
            disk.sync_folder(unfinished)
            faults.fault_point("ckpt:after_manifest", step)
            disk.write_file(unfinished / MANIFEST, [text])
""",
        test=f"{KILLED}::test_the_marker_comes_after_every_sync_and_the_name_after_the_marker",
    ),
    Bug(
        name="the marker goes last when a checkpoint is removed",
        file=STORE,
        right="            if (folder / MARKER).exists():\n                disk.remove_file",
        wrong="            if False:\n                disk.remove_file",
        test=f"{KILLED}::test_the_marker_goes_first_when_a_checkpoint_is_removed",
    ),
    Bug(
        name="the folder is not synced after the rename",
        file=STORE,
        right="""            disk.replace(unfinished, folder)
            disk.sync_folder(self.folder)
""",
        wrong="""            disk.replace(unfinished, folder)
""",
        test=f"{KILLED}::test_a_power_cut_at_any_operation_leaves_a_good_one",
    ),
    Bug(
        name="files are not synced",
        file="app/training/checkpoint/disk.py",
        right="        os.fsync(stream.fileno())\n",
        wrong="",
        test="tests/training/checkpoint/test_tensors.py::test_a_file_is_written_hashed_and_synced",
    ),
    Bug(
        name="the newest checkpoint is chosen by modification time",
        file=STORE,
        right="return sorted(found.items())",
        wrong="return sorted(found.items(), key=lambda one: one[1].stat().st_mtime_ns)",
        test=f"{ROTATION}::test_the_last_are_kept_by_step_not_by_name_or_time",
    ),
    Bug(
        name="old checkpoints are removed before the new one is complete",
        file=STORE,
        right="            self._remove_leftovers()\n",
        wrong="""            self._remove_leftovers()
            for _, older in self._folders():
                self._remove(older)
""",
        test="tests/training/checkpoint/test_checkpoint_store.py"
        "::test_a_full_disk_at_any_point_keeps_the_last_good_one",
    ),
    Bug(
        name="files are not checked against the manifest",
        file="app/training/checkpoint/checkpoint.py",
        right="if disk.read_hash(file) != expected.sha256:",
        wrong="if False:",
        test="tests/training/checkpoint/test_checkpoint_store.py::test_every_damage_is_found_and_named",
    ),
    Bug(
        name="the manifest is not checked against the marker",
        file="app/training/checkpoint/checkpoint.py",
        right="    if marker != marker_of(hashlib.sha256(text).hexdigest()):\n",
        wrong="    if not marker:\n",
        test="tests/training/checkpoint/test_checkpoint_store.py::test_every_damage_is_found_and_named",
    ),
    Bug(
        name="a run with only damaged checkpoints starts from scratch",
        file=START,
        right="    if good is None and damaged:\n",
        wrong="    if False:\n",
        test=f"{BAD_RESUME}::test_nothing_is_started_anew_over_damaged_checkpoints",
    ),
    Bug(
        name="a finished run trains again",
        file=START,
        right="    if compared.is_done:\n",
        wrong="    if False:\n",
        test=f"{BAD_RESUME}::test_a_finished_run_needs_neither_data_nor_model",
    ),
    Bug(
        name="two processes train in one folder",
        file="app/run/folder.py",
        right="        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        wrong="        pass\n",
        test=f"{BAD_RESUME}"
        "::test_a_second_process_on_a_run_is_refused_and_a_dead_ones_lock_is_taken",
    ),
    Bug(
        name="a stopped run ends with exit code 0",
        file="common/errors.py",
        right="super().__init__(128 + signum)",
        wrong="super().__init__(0)",
        test="tests/process/test_signals.py::test_outside_a_step_a_signal_ends_the_program",
    ),
    Bug(
        name="a step with a nonfinite loss is taken",
        file="app/training/module.py",
        right="    return loss * (1 + 0 * loss.detach())\n",
        wrong="    return loss\n",
        test="tests/training/test_nonfinite.py::test_an_infinite_loss_makes_its_gradients_nan",
    ),
    Bug(
        name="an asynchronous save writes the live weights instead of a copy",
        file="app/training/checkpoint/saving.py",
        right="copies[key] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)",
        wrong="copies[key] = tensor.detach()",
        test="tests/training/checkpoint/test_saving.py"
        "::test_what_is_written_is_what_was_at_the_step",
    ),
    Bug(
        name="losses of ranks are averaged instead of summed",
        file=MODULE,
        right="propagate_nonfinite(loss) * self.strategy.num_averaged_ranks",
        wrong="propagate_nonfinite(loss)",
        test=f"{STEPS}[ddp]",
    ),
    Bug(
        name="Lightning clears the gradients that a step has just computed",
        file=MODULE,
        right="    def optimizer_zero_grad(self, *args: Any) -> None:\n",
        wrong="    def zero_gradients(self, *args: Any) -> None:\n",
        test="tests/golden/test_curve.py::test_twenty_steps_of_the_default_give_the_golden_curve",
    ),
    Bug(
        name="a rank that holds the end of a row counts the documents of its start",
        file="app/training/objective/objective.py",
        right="        numbers = batch.sequence.take(numbers)\n",
        wrong="        numbers = numbers[:, : batch.labels.shape[1]]\n",
        test="tests/training/test_loss.py::test_the_parts_of_rows_add_up",
    ),
    Bug(
        name="a rank clips by the norm of its own shards",
        file="app/strategy/fsdp.py",
        right="        dist.all_reduce(squares)\n",
        wrong="",
        test=f"{STEPS}[fsdp]",
    ),
    Bug(
        name="tensor-parallel ranks do not sum partial gradients",
        file="app/strategy/tensor_parallel.py",
        right="        dist.all_reduce(grad, group=ctx.group)\n",
        wrong="",
        test=f"{STEPS}[fsdp_tp]",
    ),
    Bug(
        name="tokens are counted once per tensor-parallel rank",
        file=MODULE,
        right="return total / copies",
        wrong="return total",
        test=f"{STEPS}[fsdp_tp]",
    ),
    Bug(
        name="sharded optimizer states are lost",
        file="app/strategy/deepspeed.py",
        right="            own[key][shard.at : shard.at + shard.length].copy_(shard.of(value))\n",
        wrong="            pass\n",
        test="tests/parity/strategies/test_resume.py"
        "::test_another_strategy_resumes_with_the_same_losses[lora-chain0]",
    ),
    Bug(
        name="a document's first token is predicted from the previous document",
        file=COLLATOR,
        right="        weights[row, inputs.starts(row)] = 0\n",
        wrong="        pass\n",
        test="tests/data_modules/test_collator.py::test_packed_row",
    ),
    Bug(
        name="positions continue across documents of a pack",
        file=COLLATOR,
        right="np.arange(total) - np.repeat(self.starts(index), lengths)",
        wrong="np.arange(total)",
        test="tests/data_modules/test_collator.py::test_packed_row",
    ),
    Bug(
        name="token weights are ignored in the curves",
        file="app/training/objective/objective.py",
        right="[losses * weights, weights,",
        wrong="[losses, weights,",
        test="tests/training/test_loss.py::test_the_loss_of_a_pack_is_that_of_its_documents_alone",
    ),
    Bug(
        name="losses are summed in single precision",
        file="app/training/objective/objective.py",
        right="torch.stack(columns).double()",
        wrong="torch.stack(columns).float()",
        test="tests/training/test_loss.py::test_sums_are_exact_whatever_their_order",
    ),
    Bug(
        name="the first warm-up step has a learning rate of zero",
        file="app/training/optimizers.py",
        right="return (step + 1) / warmup",
        wrong="return step / warmup",
        test="tests/training/test_schedule.py::test_factors_are_those_by_hand[warm-up]",
    ),
    Bug(
        name="a copy of a held-out row is trained on",
        file="data_modules/tokens/datasets.py",
        right="training = ~mask & ~np.isin(store.rows, repeated)",
        wrong="training = ~mask",
        test="tests/data_modules/test_mixture.py::test_no_content_is_on_both_sides",
    ),
    Bug(
        name="cached tokens of other settings are reused",
        file="data_modules/tokens/prepare.py",
        right="json.dumps([self.path, self.split, self.parts], sort_keys=True)",
        wrong="json.dumps([self.path, self.split])",
        test="tests/data_modules/test_cache.py::test_a_cache_miss_reports_what_changed",
    ),
    Bug(
        name="the fused step ignores the adapter's scaling",
        file="app/model/adapter/fused.py",
        right="scale: float = layer.scaling[name]",
        wrong="scale: float = 1.0",
        test="tests/model/test_lora_fused.py::test_values_and_gradients_equal_peft",
    ),
    Bug(
        name="an out-of-range number is accepted",
        file="common/facts.py",
        right="        and all(COMPARISONS[name]",
        wrong="        or all(COMPARISONS[name]",
        test="tests/config/test_settings.py::test_a_field_tells_which_values_it_takes",
    ),
    Bug(
        name="a resumed run may have other settings",
        file="app/run/manifest.py",
        right='        if change.rule == "fixed":\n',
        wrong='        if change.rule == "never":\n',
        test="tests/bad_input/test_resume.py::test_settings_that_make_another_run_are_refused",
    ),
    Bug(
        name="data sets of a mixture are seen equally often",
        file="data_modules/packing.py",
        right="[float(weight) for weight in weights]",
        wrong="[float(weights[0]) for _ in weights]",
        test="tests/data_modules/test_mixture.py::test_weight_is_the_number_of_times_a_row_is_seen",
    ),
    Bug(
        name="a password in a URL is logged",
        file="common/redaction.py",
        right='        text = _USER_INFO.sub(f"{REDACTED}@", text)\n',
        wrong="        pass\n",
        test="tests/common/test_redaction.py::test_secrets_are_redacted",
    ),
    Bug(
        name="token rows decay in every step",
        file="app/training/optimizers.py",
        right='if weight.is_vector or weight.kind == "token rows":',
        wrong="if weight.is_vector:",
        test="tests/training/test_optimizer.py"
        "::test_magnitudes_and_token_rows_do_not_decay_and_matrices_saved_whole_do",
    ),
    Bug(
        name="a pattern's ratio is not applied",
        file="app/training/optimizers.py",
        right='"lr": lr * ratio,',
        wrong='"lr": lr,',
        test="tests/training/test_optimizer.py"
        "::test_the_first_pattern_that_fits_a_whole_name_decides",
    ),
    Bug(
        name="an experiment's setting overrides an alias on the command line",
        file="app/config/load.py",
        right="            values[group].pop(name, None)\n",
        wrong="            pass\n",
        test="tests/config/test_sources.py"
        "::test_one_of_two_ways_to_say_a_thing_wins_over_the_experiments_other_one",
    ),
    Bug(
        name="counts of tokenizing processes are not summed",
        file="data_modules/tokens/encode.py",
        right="getattr(self, name) + getattr(other, name)",
        wrong="max(getattr(self, name), getattr(other, name))",
        test="tests/data_modules/test_prepare.py::test_several_processes_give_the_same_rows",
    ),
    Bug(
        name="trained tokens are only those of the last step",
        file="app/training/metrics.py",
        right="                count + added\n",
        wrong="                added\n",
        test="tests/training/test_curves.py::test_trained_tokens_are_those_of_the_plan",
    ),
    Bug(
        name="a tokenizer counts as verified whatever it holds",
        file="app/model/tokenizer_file.py",
        right="return _note(file).is_file()",
        wrong="return True",
        test="tests/model/test_tokenizer_file.py::test_what_is_saved_encodes_as_the_file",
    ),
    Bug(
        name="a tokenizer is verified by its name alone",
        file="app/model/tokenizer_file.py",
        right="hashlib.sha256(each.read_bytes()).hexdigest() if is_small",
        wrong="each.name if is_small",
        test="tests/model/test_tokenizer_file.py"
        "::test_a_verified_tokenizer_is_not_verified_again_until_a_byte_changes",
    ),
    Bug(
        name="a tokenizer that transformers changes is remembered as verified",
        file="app/model/tokenizer_file.py",
        right="    if not (changed := _difference(tokenizer, own, declared)):\n",
        wrong="    remember_verified(file)\n"
        "    if not (changed := _difference(tokenizer, own, declared)):\n",
        test="tests/model/test_tokenizer_file.py"
        "::test_a_tokenizer_that_transformers_changes_is_verified_at_each_start",
    ),
    Bug(
        name="regular expressions of a tokenizer are not tried",
        file="app/model/tokenizer_file.py",
        right="    if found and (slow := _try_expressions(found)) is not None:\n",
        wrong="    if False and (slow := _try_expressions(found)) is not None:\n",
        test="tests/bad_input/test_tokenizer_steps.py"
        "::test_an_expression_that_takes_exponential_time_is_refused",
    ),
    Bug(
        name="gradients of log-probabilities have the wrong sign",
        file="app/model/head.py",
        right="bias, labels, -outer[0], *ctx.options",
        wrong="bias, labels, outer[0], *ctx.options",
        test="tests/model/test_head.py::test_values_and_gradients_equal_those_of_the_whole_logits",
    ),
    Bug(
        name="log-probabilities keep a copy of the head",
        file="app/model/head.py",
        right="ctx.save_for_backward(hidden, weight, bias, labels)",
        wrong="ctx.save_for_backward(hidden, weight.to(hidden.dtype), bias, labels)",
        test="tests/model/test_head.py"
        "::test_log_probabilities_keep_neither_logits_nor_a_copy_of_the_weight",
    ),
    Bug(
        name="log-probabilities are no part of the forward's output",
        file="app/model/head.py",
        right="return first + empty.sum(), second",
        wrong="return first, second",
        test="tests/model/test_head.py::test_the_backward_pass_visits_the_output_of_the_forward",
    ),
    Bug(
        name="a busy machine is not waited for",
        file="common/untrusted.py",
        right="receiver.poll(_PATIENCE * limits.seconds)",
        wrong="receiver.poll(limits.seconds)",
        test="tests/data_modules/test_template_limits.py::test_a_busy_machine_is_waited_for",
    ),
    Bug(
        name="pairs and verdicts are looked for in the first rows alone",
        file="data_modules/tokens/encode.py",
        right="        if dataset.format is None:\n",
        wrong="        if dataset.format is None and row.origin is None:\n",
        test="tests/data_modules/test_prepare.py"
        "::test_rows_that_mean_more_are_refused_wherever_they_are",
    ),
    Bug(
        name="a range of characters begins a token early",
        file="data_modules/template/encoding.py",
        right='self.ends.searchsorted(start, side="right")',
        wrong='self.ends.searchsorted(start, side="left")',
        test="tests/data_modules/test_template_words.py"
        "::test_characters_map_to_tokens_as_by_the_tokenizers_offsets",
    ),
    Bug(
        name="train_detail trains the characters between its entries",
        file="data_modules/template/masking.py",
        right="            yield WeightedRange(start, stop, 0.0)\n        start = max(",
        wrong="            pass\n        start = max(",
        test="tests/data_modules/test_train_detail.py"
        "::test_a_token_is_trained_if_all_its_characters_are_and_with_a_word_the_blank_before_it",
    ),
    Bug(
        name="train_detail's last character is left out",
        file="data_modules/format/fields.py",
        right="            ranges.append((begin, first))",
        wrong="            ranges.append((begin, end))",
        test="tests/data_modules/test_train_detail.py"
        "::test_characters_without_an_entry_are_not_trained_and_the_turn_keeps_its_weight",
    ),
    Bug(
        name="a plan refuses what this machine lacks",
        file="app/preflight/couplings/__init__.py",
        right="if on_this_machine or not row.is_of_machine",
        wrong="if row.why",
        test="tests/preflight/test_couplings.py::test_a_preview_counts_no_ranks_of_another_machine",
    ),
    Bug(
        name="a setting without effect is accepted",
        file="app/preflight/couplings/devices.py",
        right="if is_set(part, name) and rule.is_unused(config):",
        wrong="if is_set(part, name) and not rule.is_unused(config):",
        test="tests/preflight/test_couplings.py::test_a_setting_that_nothing_reads_is_refused",
    ),
    Bug(
        name="ranks that tie other weights go on",
        file="app/strategy/loading.py",
        right="owners.setdefault(id(t), name),",
        wrong="name,",
        test="tests/strategy/test_sharded.py::test_ranks_with_different_models_all_stop",
    ),
    Bug(
        name="a step is prepared without the checkpoint's optimizer",
        file="app/training/prepare.py",
        right="        module.resume.restore_optimizer()",
        wrong="        pass",
        test="tests/training/checkpoint/test_resume.py"
        "::test_a_resumed_run_is_the_uninterrupted_one",
    ),
    Bug(
        name="every rank drops out alike",
        file="app/training/prepare.py",
        right="torch.initial_seed() + strategy.random_rank",
        wrong="torch.initial_seed()",
        test="tests/training/test_prepare_model.py::test_ranks_draw_other_dropout_unless_they_share_rows",
    ),
    Bug(
        name="a text passes for a number of config.json",
        file="app/model/config_values.py",
        right="(str, list, dict)",
        wrong="(list, dict)",
        test="tests/model/test_config_source.py::test_what_is_refused",
    ),
    Bug(
        name="a tokenizer that drops letters is opened",
        file="app/model/tokenizer_file.py",
        right="        if not is_kept:",
        wrong="        if not text:",
        test="tests/bad_input/test_base_files.py::test_a_tokenizer_that_drops_letters",
    ),
    Bug(
        name="a layer more than config.json counts is ignored",
        file="app/preflight/base_model.py",
        right='if int(found["number"]) >= described)',
        wrong='if int(found["number"]) > described)',
        test="tests/bad_input/test_base_files.py::test_layers_that_would_be_left_out",
    ),
    Bug(
        name="a head that is in no file passes for one of its own",
        file="app/model/description.py",
        right="for each in (*tables, head) if",
        wrong="for each in tables if",
        test="tests/preflight/test_modules.py"
        "::test_files_and_numbers_describe_the_modules_of_the_model[llama]",
    ),
    Bug(
        name="the last expert of a file is not counted",
        file="app/model/description.py",
        right='max(int(single["number"]) + 1, ',
        wrong='max(int(single["number"]), ',
        test="tests/model/test_experts.py"
        "::test_file_headers_describe_the_same_experts_as_the_model[qwen3_moe]",
    ),
    Bug(
        name="a tied head is planned as a second matrix",
        file="app/planning/planned_model.py",
        right="head = {} if base.is_tied else weights_of(",
        wrong="head = weights_of(",
        test="tests/planning/test_model_size.py::test_a_tied_head_is_counted_once",
    ),
    Bug(
        name="a rank's rows are not rounded up",
        file="app/planning/states.py",
        right="* math.ceil(rows * experts / layout.num_shards) / rows",
        wrong="* experts / layout.num_shards",
        test="tests/strategy/test_fake_ranks.py"
        "::test_memory_of_an_fsdp_rank_equals_the_estimate[llama70b on 64]",
    ),
    Bug(
        name="scales are never quantized",
        file="app/model/quantization.py",
        right="bnb_4bit_use_double_quant=config.double_quant",
        wrong="bnb_4bit_use_double_quant=False",
        test="tests/model/test_quantization.py::test_double_quantization_saves_bits",
    ),
    Bug(
        name="another method than that of the files is accepted",
        file="app/model/quantization.py",
        right='if config.method not in ("none", method):',
        wrong='if config.method not in ("none", "nf4", "int8"):',
        test="tests/model/test_quantization.py"
        "::test_a_method_other_than_that_of_the_files_is_refused",
    ),
    Bug(
        name="weights above a precision's largest number are loaded",
        file="app/model/base.py",
        right="if not (-most <= smallest and largest <= most):",
        wrong="if not -most <= smallest:",
        test="tests/bad_input/test_base_files.py::test_weights_that_a_precision_cannot_hold",
    ),
    Bug(
        name="a bias that the model has not is ignored",
        file="app/model/base.py",
        right='known and leaf in ("weight", "bias") and',
        wrong='known and leaf == "weight" and',
        test="tests/bad_input/test_base_files.py::test_a_bias_that_would_be_left_out",
    ),
    Bug(
        name="the rejected answer is preferred by IPO",
        file="app/training/objective/pairs.py",
        right="losses = (gains[:, 0] - gains[:, 1] - 0.5",
        wrong="losses = (gains[:, 1] - gains[:, 0] - 0.5",
        test="tests/training/test_dpo.py::test_loss_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        name="ORPO compares probabilities, not odds",
        file="app/training/objective/pairs.py",
        right="log_odds = bounded - torch.log(-torch.expm1(bounded))",
        wrong="log_odds = bounded",
        test="tests/training/test_dpo.py::test_loss_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        name="SimPO's margin is added",
        file="app/training/objective/pairs.py",
        right="rewards[:, 1] - config.margin)",
        wrong="rewards[:, 1] + config.margin)",
        test="tests/training/test_dpo.py::test_loss_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        name="the reference keeps the adapter",
        file="app/training/objective/pairs.py",
        right="with without_dropout(model), adapter_disabled(model):",
        wrong="with without_dropout(model):",
        test="tests/training/test_dpo.py::test_loss_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        name="the drift of KTO counts against wanted answers twice",
        file="app/training/objective/pairs.py",
        right="advantage = torch.where(is_wanted, gains - kl, kl - gains)",
        wrong="advantage = torch.where(is_wanted, gains - 2 * kl, kl - gains)",
        test="tests/training/test_kto.py::test_loss_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        name="each answer is its own stranger",
        file="data_modules/format/meaning.py",
        right="iter([*items[1:], items[0]])",
        wrong="iter(items)",
        test="tests/training/test_kto.py::test_each_prompt_gets_the_answer_of_the_next_row_of_its_kind",
    ),
    Bug(
        name="a text is rated at the token before its last",
        file="app/training/objective/objective.py",
        right="(row, end - 1)",
        wrong="(row, end - 2)",
        test="tests/training/test_classify.py::test_loss_and_gradients_are_those_of_each_text_alone",
    ),
    Bug(
        name="a recall counts all texts",
        file="app/training/objective/objective.py",
        right="counts = torch.where(figure.isnan(), 0, weights)",
        wrong="counts = weights",
        test="tests/training/test_classify.py::test_recall_and_precision_are_of_the_texts_and_the_guesses_of_a_class",
    ),
    Bug(
        name="the weight of a pair is lost",
        file="app/training/objective/objective.py",
        right="        (losses * weights).sum(),",
        wrong="        losses.sum(),",
        test="tests/training/test_dpo.py::test_loss_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        name="any first loss is taken",
        file="app/training/metrics.py",
        right="if abs(loss - self.value) > self.tolerance * self.value:",
        wrong="if loss < 0:",
        test="tests/training/test_dpo.py::test_a_reference_that_is_wrong_by_a_hundred_thousandth_is_caught",
    ),
    Bug(
        name="the gradient in FP8 forgets the scales of the weight",
        file="app/model/fp8.py",
        right="quantize_rows(*grads, factors=[matrix.scales for matrix in matrices])",
        wrong="quantize_rows(*grads)",
        test="tests/model/test_fp8.py::test_the_gradient_is_that_of_the_rounded_weight_and_gradient",
    ),
    Bug(
        name="all tokens share one scale in FP8",
        file="app/model/fp8.py",
        right="largest = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True)",
        wrong="largest = rows.abs().max().expand(len(rows), 1)",
        test="tests/model/test_fp8.py::test_each_token_is_rounded_by_itself_and_zeros_inf_and_nan_stay",
    ),
    Bug(
        name="the first decoder layer trains in FP8",
        file="app/model/fp8.py",
        right="inner = repeated_layers(model)[1:-1]",
        wrong="inner = repeated_layers(model)[:-1]",
        test="tests/model/test_fp8.py::test_inner_layers_train_in_fp8_and_evaluate_as_before",
    ),
    Bug(
        name="the last decoder layer is quantized to FP8",
        file="app/model/layers.py",
        right="return num_layers - (num_layers >= _MIN_LAYERS_TO_KEEP_ONE)",
        wrong="return num_layers",
        test="tests/model/test_fp8.py::test_the_last_of_ten_layers_is_not_quantized",
    ),
    Bug(
        name="routers are quantized to FP8",
        file="app/model/fp8.py",
        right="        and not _ROUTER.search(name)\n",
        wrong="",
        test="tests/model/test_fp8.py::test_layers_are_quantized_but_not_head_routers_and_odd_widths",
    ),
    Bug(
        name="key heads are repeated in the wrong order",
        file="app/model/attention/exchange.py",
        right="part.repeat_interleave(repeats, dim=1)",
        wrong="part.repeat(1, repeats, 1, 1)",
        test="tests/strategy/test_context_parallel.py"
        "::test_slices_give_the_loss_and_gradients_of_whole_rows",
    ),
    Bug(
        name="the gradient of an exchange stays where it is",
        file="app/model/attention/exchange.py",
        right="return _all_to_all(gradients[0], ctx.ranks), None",
        wrong="return gradients[0], None",
        test="tests/strategy/test_context_parallel.py"
        "::test_slices_give_the_loss_and_gradients_of_whole_rows",
    ),
    Bug(
        name="a document that continues in a slice sees only that slice",
        file="app/model/attention/documents.py",
        right="range(chunk.start, end), first, []",
        wrong="range(chunk.start, end), chunk.start, []",
        test="tests/strategy/test_context_parallel.py"
        "::test_slices_give_the_loss_and_gradients_of_whole_rows",
    ),
    Bug(
        name="a longer context keeps the base's limit",
        file="app/model/rope.py",
        right="    config.max_position_embeddings = context_len\n",
        wrong="",
        test="tests/model/test_rope.py::test_a_context_that_cannot_be_extended_is_refused",
    ),
    Bug(
        name="a window sees one token too many",
        file="app/model/attention/inputs.py",
        right="visible = visible.triu(1 - window)",
        wrong="visible = visible.triu(-window)",
        test="tests/model/test_attention.py::test_a_dense_mask_is_that_of_each_document",
    ),
    Bug(
        name="a request of another site is answered",
        file="app/serving/server.py",
        right="if origin is not None and origin not in",
        wrong="if origin is None and origin not in",
        test="tests/serving/test_server.py::test_foreign_hosts_and_origins_are_refused",
    ),
    Bug(
        name="any key opens the server",
        file="app/serving/server.py",
        right='if scheme.lower() != "bearer" or not hmac.compare_digest(*digests):',
        wrong='if scheme.lower() != "bearer":',
        test="tests/serving/test_server.py::test_other_addresses_require_a_key_which_is_compared_in_constant_time",
    ),
    Bug(
        name="few rows make a verdict",
        file="app/evaluation/significance.py",
        right="    if num_changed < MIN_CHANGED:",
        wrong="    if num_changed < 0:",
        test="tests/evaluation/test_significance.py::test_few_rows_are_not_significant_even_if_all_agree",
    ),
    Bug(
        name="rows are resampled without their weights",
        file="app/evaluation/significance.py",
        right="sums = np.stack([(differences * weights)[order], weights[order]])",
        wrong="sums = np.stack([differences[order], np.ones(len(order))])",
        test="tests/evaluation/test_significance.py::test_rows_are_weighted_by_their_tokens",
    ),
    Bug(
        name="a better model is called worse",
        file="app/evaluation/significance.py",
        right="(self.difference < 0) == self.spec.is_lower_better",
        wrong="(self.difference > 0) == self.spec.is_lower_better",
        test="tests/evaluation/test_significance.py"
        "::test_worse_data_sets_that_were_not_trained_on_are_forgotten",
    ),
    Bug(
        name="the sign of an answer is lost",
        file="app/evaluation/metrics.py",
        right='if "-" in (match["sign"], match["late_sign"]):',
        wrong='if "-" == match["sign"]:',
        test="tests/evaluation/test_metrics.py::test_a_number_is_read_as_written",
    ),
    Bug(
        name="a judge's verdict in one order counts",
        file="app/evaluation/judge/grading.py",
        right="first.score if first.score == second.score else 0.5",
        wrong="first.score",
        test="tests/evaluation/test_judge.py"
        "::test_verdicts_are_grades_and_wins_with_the_order_swapped",
    ),
    Bug(
        name="the worst trial is listed first",
        file="app/sweep/trials.py",
        right="return sorted(trials, key=lambda trial: trial.sort_key)",
        wrong="return sorted(trials, key=lambda trial: trial.sort_key, reverse=True)",
        test="tests/sweep/test_sweep.py::test_every_combination_runs_in_a_process_and_is_listed",
    ),
    Bug(
        name="a streamed backward pass fetches the layer above",
        file="app/model/streaming.py",
        right="self._start_copy(number - 1 if is_backward else number + 1)",
        wrong="self._start_copy(number + 1)",
        test="tests/model/test_streaming.py::test_a_backward_pass_that_ends_early_copies_one_layer_below",
    ),
    Bug(
        name="a backward pass does not enter streamed layers",
        file="app/model/streaming.py",
        right="each.register_hook(lambda _: self.enter(number))",
        wrong="pass",
        test="tests/model/test_streaming.py::test_gradients_are_bit_identical_and_each_pass_copies_each_layer_once",
    ),
    Bug(
        name="gradients of experts on other ranks are means",
        file="app/strategy/tensor_parallel.py",
        right="self.group, float(size))",
        wrong="self.group, 1.0)",
        test="tests/strategy/test_expert_parallel.py::test_ranks_train_as_one",
    ),
    Bug(
        name="the gradients of weights are those of the last chunk",
        file="app/model/kernels.py",
        right="totals = tuple(map(torch.add, totals, found[1:])) if totals else found[1:]",
        wrong="totals = found[1:]",
        test="tests/model/test_feed_forward.py::test_chunks_give_the_gradients_of_whole_rows",
    ),
    Bug(
        name="the check of FP8 leaves sums of its step",
        file="app/training/prepare.py",
        right="    module.reset_step()\n",
        wrong="",
        test="tests/training/test_prepare_model.py::test_the_check_leaves_no_trace",
    ),
    Bug(
        name="auto splits rows that are as fast whole",
        file="app/planning/choose.py",
        right="return speed > (1 + KERNEL_ERROR) * other",
        wrong="return True",
        test="tests/planning/test_choose.py::test_the_strategy_with_the_least_communication_that_fits",
    ),
    Bug(
        name="auto takes the first mode that fits",
        file="app/planning/choose.py",
        right="        if not run.hardware.has_known_rates:\n",
        wrong="        if run.is_on_gpu:\n",
        test="tests/planning/test_choose.py::test_a_mode_is_chosen_with_the_micro_batch_that_it_leaves_room_for",
    ),
    Bug(
        name="ties of an AUC count as right",
        file="app/evaluation/metrics.py",
        right="np.cumsum(counts) - (counts - 1) / 2",
        wrong="np.cumsum(counts)",
        test="tests/evaluation/test_metrics.py::test_the_auc_is_the_share_of_rightly_ranked_pairs",
    ),
    Bug(
        name="the stored reference of other answers is that of the own ones",
        file="app/training/objective/pairs.py",
        right="for each in (batch, batch.others)]",
        wrong="for each in (batch, batch)]",
        test="tests/training/test_kto.py::test_a_stored_reference_is_that_of_the_base",
    ),
    Bug(
        name="a trial that a signal ended has a negative exit code",
        file="app/sweep/trials.py",
        right="return 128 - code if code is not None and code < 0 else code",
        wrong="return code",
        test="tests/sweep/test_slurm.py::test_a_trial_that_a_signal_ends_can_be_read",
    ),
]


def inject(bug: Bug, root: Path) -> str:
    """Inject `bug` into the tree at `root`; return the former text of the file."""
    file = root / bug.file
    text = file.read_text(encoding="utf-8")
    if text.count(bug.right) != 1:
        raise ValueError(f"{bug.name}: its text occurs {text.count(bug.right)} times in {bug.file}")
    file.write_text(text.replace(bug.right, bug.wrong), encoding="utf-8")
    return text


def run_tests(root: Path, tests: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run `tests` of the tree at `root` against its own code."""
    # Bytecode is matched by size and second; a file may change twice within a second.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *options, *tests]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )


def main(words: Sequence[str]) -> int:
    """Inject the bugs whose names contain one of `words`, all bugs without words."""
    bugs = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    if not bugs:
        print(
            f"no bug's name contains {' or '.join(map(repr, words))}; their names:", file=sys.stderr
        )
        print(*(f"  {bug.name}" for bug in BUGS), sep="\n", file=sys.stderr)
        return UNKNOWN_NAME
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        root.mkdir()
        for part in PARTS:
            if (ROOT / part).is_dir():
                unneeded = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / part, root / part, ignore=unneeded)
            else:
                shutil.copy(ROOT / part, root)
        before = run_tests(root, sorted({bug.test for bug in bugs}))
        if before.returncode != PASSED:
            print(before.stdout, before.stderr, "without a bug the tests must pass", sep="\n")
            return 1
        caught = {bug.name: find_catcher(bug, root) for bug in bugs}
    everyday = list(caught.values()).count("make test")
    missed = [name for name, catcher in caught.items() if catcher is None]
    print(f"{everyday} of {len(bugs)} bugs caught by make test, {len(bugs) - len(missed)} by all")
    return 1 if missed else 0


def find_catcher(bug: Bug, root: Path) -> str | None:
    """Print and return which command's tests catch the bug, None if none do."""
    began = time.monotonic()
    text = inject(bug, root)
    catcher, done = "make test", run_tests(root, [bug.test], "-m", "not slow")
    if done.returncode == NOTHING_SELECTED:
        catcher, done = "make test-all", run_tests(root, [bug.test])
    (root / bug.file).write_text(text, encoding="utf-8")
    # Other exit codes mean that no test ran, or not to its end.
    result = {PASSED: "NOT CAUGHT", FAILED: f"caught by {catcher}"}
    outcome = result.get(done.returncode, "NO TEST RAN")
    print(f"{outcome}: {bug.name} ({time.monotonic() - began:.0f} s)\n  {bug.test}", flush=True)
    if outcome == "NO TEST RAN":
        print(done.stdout, done.stderr, sep="\n")
    return catcher if done.returncode == FAILED else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
