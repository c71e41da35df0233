// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/agentconfig"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// serveStatus serves a handler on the socket of a new dataDir, and returns the dataDir.
func serveStatus(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	dir := t.TempDir()
	assert.NoError(t, os.WriteFile(filepath.Join(dir, "made-by-ip-masq"), nil, 0o600))
	l := assert.Must(net.Listen("unix", filepath.Join(dir, "reconciler.sock")))(t)
	s := &http.Server{Handler: h, ReadHeaderTimeout: time.Second}
	go func() { _ = s.Serve(l) }() // until it is closed
	t.Cleanup(func() { _ = s.Close() })
	return dir
}

// answering answers with a status.
func answering(t *testing.T, s metrics.Status) http.HandlerFunc {
	t.Helper()
	doc := assert.Must(json.Marshal(s))(t)
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || r.URL.Path != "/v1/status" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(doc)
	}
}

// inspectNode inspects the node with these flags.
func inspectNode(t *testing.T, args ...string) (*inspection, string) {
	t.Helper()
	var stderr bytes.Buffer
	a := &app{out: &bytes.Buffer{}, err: &stderr}
	assert.NoError(t, a.root().ParseFlags(args))
	n := assert.Must(a.inspect(t.Context()))(t)
	n.printSettingsOrigin(a)
	return n, strings.TrimSuffix(stderr.String(), "\n")
}

// daemonSetSettings are settings as the flags of a DaemonSet state them.
func daemonSetSettings(t *testing.T, dataDir string) config.Settings {
	t.Helper()
	s := config.DefaultSettings()
	for _, x := range [][2]string{
		{"data_dir", dataDir}, {"agent_config_dir", "/nowhere/config"}, {"agent.enableIPv6", "true"}, {"agent.masqChain", "PODS"},
		{"agent.toPorts", "1024-29999,32768-65535"}, {"agent.nonMasqueradeCIDRs", ""}, {"resync_interval", "1h"}, {"cni_conf_dir", "/nowhere/net.d"},
	} {
		assert.NoError(t, s.Set(x[0], x[1]))
	}
	return s
}

// TestSettingsOfTheReconciler checks that a command has the settings and agent files of the reconciler that
// runs, except those for which a flag is given.
func TestSettingsOfTheReconciler(t *testing.T) {
	t.Parallel()
	var dataDir string
	var status metrics.Status
	dataDir = serveStatus(t, func(w http.ResponseWriter, r *http.Request) { answering(t, status)(w, r) })
	want := daemonSetSettings(t, dataDir)
	status = metrics.Status{
		Version: "v9", PID: 12, Settings: want.List(), AgentSource: true, SettingsErr: "reconciler.toml:1: bad",
		AgentFiles: &agentconfig.Files{Dir: "/nowhere/config", Names: []string{"ip-masq-agent"}}, AgentErr: "ip-masq-agent:1: bad",
	}
	n, said := inspectNode(t, "--data-dir", dataDir)
	if !n.Settings.Equal(want) {
		t.Errorf("settings of the command differ:\n%s", cmp.Diff(want.List(), n.Settings.List()))
	}
	if want := "from the reconciler that runs (pid 12, version v9) and flags"; said != "" || n.settingsFrom != want {
		t.Errorf("said %q; the settings are %q, want %q", said, n.settingsFrom, want)
	}
	if n.SettingsErr == nil || n.SettingsErr.Error() != status.SettingsErr {
		t.Errorf("error of the settings: %v", n.SettingsErr)
	}
	src := n.Read()
	if src.Agent == nil || src.AgentErr == nil || src.AgentErr.Error() != "ip-masq-agent:1: bad" || src.Agent.Names[0] != "ip-masq-agent" {
		t.Errorf("agent files: %+v, %v", src.Agent, src.AgentErr)
	}

	n, _ = inspectNode(t, "--data-dir", dataDir, "--masq-chain", "OTHER", "--cni-bin-dir", "/bin")
	assert.NoError(t, errors.Join(want.Set("agent.masqChain", "OTHER"), want.Set("cni_bin_dir", "/bin")))
	if !n.Settings.Equal(want) {
		t.Errorf("settings with two flags differ:\n%s", cmp.Diff(want.List(), n.Settings.List()))
	}
	if src := n.Read(); src.AgentErr != nil || src.Agent == nil || src.Agent.Source.Policy.Chain != "OTHER" {
		t.Errorf("agent files are not read with the flag: %+v, %v", src.Agent, src.AgentErr)
	}

	// A file that the operator names is what counts.
	file := filepath.Join(t.TempDir(), "reconciler.toml")
	assert.NoError(t, os.WriteFile(file, fmt.Appendf(nil, "data_dir = %q\n", dataDir), 0o644))
	n, said = inspectNode(t, "--config", file)
	if n.Settings.AgentConfigDir != "" || n.Settings.Agent.Policy.Chain == "PODS" || said != "" || !n.active.Answers || n.AgentFiles != nil {
		t.Errorf("with --config: %+v, said %q", n.Settings, said)
	}
}

// TestReconcilerWithoutAnswer checks that commands go on without a reconciler that hangs, or that is of
// another version, and say so.
func TestReconcilerWithoutAnswer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"hangs": {
			func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			"settings: the reconciler that runs does not answer: no answer in 2s; from the defaults and flags",
		},
		"another version": {
			http.NotFound,
			"settings: the reconciler that runs does not answer: it is of another version; use the program of its version; " +
				"from the defaults and flags",
		},
		"settings of another version": {
			answering(t, metrics.Status{Version: "v10", Settings: []config.Setting{
				{Key: "log_format", Value: "xml", Origin: config.FlagOrigin},
			}}),
			"settings: the reconciler that runs does not answer: its version is v10, and this one, unknown, cannot take its settings: " +
				"log_format: xml is not one of the choices; write text or json; use the program of that version; from the defaults and flags",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dataDir := serveStatus(t, c.answer)
			lock := assert.Must(reconcile.Open(config.Settings{DataDir: dataDir}, "", nil).Dir.InstanceLock())(t)
			defer func() { _ = lock.Release() }()
			start := time.Now()
			n, said := inspectNode(t, "--data-dir", dataDir)
			if said != c.want {
				t.Errorf("said  %q,\nwant %q", said, c.want)
			}
			if !n.active.Running || n.active.Answers {
				t.Errorf("reconciler: %+v", n.active)
			}
			if took := time.Since(start); timelimit.Exceeded(took, 2*answerTime) {
				t.Errorf("waited %s", took)
			}
		})
	}
}

// TestPluginOfTheReconciler checks that a program in a directory that only the reconciler names is not run:
// another program may listen in its place.
func TestPluginOfTheReconciler(t *testing.T) {
	t.Parallel()
	binDir := t.TempDir()
	plugin, ran := filepath.Join(binDir, "ip-masq"), filepath.Join(binDir, "ran")
	assert.NoError(t, os.WriteFile(plugin, []byte("#!/bin/sh\necho >"+ran+"\necho 'CNI ip-masq plugin v7'\n"), 0o755))
	for _, version := range []string{"v6", ""} {
		dataDir := serveStatus(t, answering(t, metrics.Status{PluginVersion: version,
			Settings: []config.Setting{{Key: "cni_bin_dir", Value: binDir, Origin: config.FlagOrigin}}}))
		n, _ := inspectNode(t, "--data-dir", dataDir)
		if got, err := n.pluginVersion(t.Context(), plugin); got != version || (err == nil) != (version != "") {
			t.Errorf("version %q, %v, want %q", got, err, version)
		}
		if _, err := os.Stat(ran); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("the program was run (%v)", err)
		}
		n, _ = inspectNode(t, "--data-dir", dataDir, "--cni-bin-dir", binDir)
		if got, err := n.pluginVersion(t.Context(), plugin); got != "v7" || err != nil {
			t.Errorf("with the flag: version %q, %v", got, err)
		}
		assert.NoError(t, os.Remove(ran))
	}
}

// TestDataDirOfOwnedChains checks that a chain of another program does not hide the node's dataDir.
func TestDataDirOfOwnedChains(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		named []string
		want  string
	}{
		{nil, ""},
		{[]string{"/a", "", "/b"}, "/a"},
		{[]string{config.DefaultDataDir, "/a"}, config.DefaultDataDir},
		{[]string{"/a", config.DefaultDataDir}, config.DefaultDataDir},
	} {
		var owned []netfilter.OwnedChain
		for _, dir := range c.named {
			owned = append(owned, netfilter.OwnedChain{Owner: policy.Owner{DataDir: dir}})
		}
		if got := dataDirOf(owned).Value; got != c.want {
			t.Errorf("%q: dataDir %s, want %s", c.named, got, c.want)
		}
	}
}

// TestProblemsOfTheLoop checks that problems which the reconciler and a dry run both find are listed once.
func TestProblemsOfTheLoop(t *testing.T) {
	t.Parallel()
	agent := policy.SourceID{Kind: policy.AgentFiles}
	n := &inspection{active: activeReconciler{problems: []reconcile.Problem{
		{Reason: reconcile.ReasonSource, Source: agent, Err: errors.New("line 2: bad")},
		{Reason: reconcile.ReasonRules, Chain: "A", Err: errors.New("the rules cannot be written")},
		{Reason: reconcile.ReasonFlapping, Err: errors.New("reverted")},
	}}}
	only := reconcile.Problem{Reason: reconcile.ReasonRules, Chain: "B", Err: errors.New("2 rules are missing")}
	got := n.problems(&reconcile.Report{}, []reconcile.Problem{
		{Reason: reconcile.ReasonSource, Source: agent, Err: errors.New("line 1: bad")},
		{Reason: reconcile.ReasonRules, Chain: "A", Err: errors.New("4 rules are missing")},
		only,
	})
	want := append([]reconcile.Problem{only}, n.active.problems...)
	assert.Equal(t, "problems", got, want, cmp.Comparer(errors.Is))
	n.active.Answers = true
	late := policy.SourceID{Kind: policy.Network, Name: "late"}
	notApplied := n.notApplied(&reconcile.Report{Pending: []policy.SourceID{agent, late}})
	assert.Equal(t, "not applied", mapped(notApplied, error.Error), []string{`network "late": the policy that its files state now is not in force`})
	// The policy of the agent files, which the reconciler could not apply, asks for these rules.
	if got := n.problems(&reconcile.Report{Pending: []policy.SourceID{agent}}, []reconcile.Problem{only}); len(got) != len(n.active.problems) {
		t.Errorf("while a policy is withheld: %v", got)
	}
}

// TestSourceStates checks what status says to be in force of each source.
func TestSourceStates(t *testing.T) {
	t.Parallel()
	network := func(name string) policy.SourceID { return policy.SourceID{Kind: policy.Network, Name: name} }
	agent := policy.SourceID{Kind: policy.AgentFiles}
	var stored []policy.Source
	for _, name := range []string{"good", "late", "loser", "gone"} {
		stored = append(stored, policy.Source{ID: network(name)})
	}
	r := &reconcile.Report{
		Sources: &reconcile.Sources{
			ConfDir: config.ConfDir{Conflists: []config.Conflist{{File: "/etc/cni/net.d/10-good.conflist", Network: "good", Entries: make([]config.ConflistEntry, 1)}}},
			Agent:   &agentconfig.Files{Dir: "/etc/config", Names: []string{"ip-masq-agent"}},
		},
		State: store.State{Sources: stored},
		Rules: &enforce.State{Chains: []enforce.Chain{{Policy: policy.Policy{
			Conflicts: policy.ConflictErrors{{InForce: policy.Origin{Source: network("good")}, Superseded: policy.Origin{Source: network("loser")}}},
		}}}},
		Pending: []policy.SourceID{network("late")},
		Problems: []reconcile.Problem{
			{Reason: reconcile.ReasonSource, Source: agent, Err: errors.New("bad")},
			{Reason: reconcile.ReasonConflict, Source: network("refused"), Err: errors.New("conflict")},
		},
	}
	n := &inspection{Node: reconcile.Open(config.Settings{DataDir: filepath.Join(t.TempDir(), "none")}, "", nil)}
	want := []sourceStatus{
		{Source: network("gone"), State: "in force"},
		{Source: network("good"), State: "in force", Files: []string{"/etc/cni/net.d/10-good.conflist"}},
		{Source: network("late"), State: "pending"},
		{Source: network("loser"), State: "superseded"},
		{Source: network("refused"), State: "superseded"},
		{Source: agent, State: "invalid", Files: []string{"/etc/config/ip-masq-agent"}},
	}
	assert.Equal(t, "sources", sourcesOf(n, r, r.Rules), want, cmpopts.EquateEmpty())
}

// TestInvalidSettings checks that a command which goes on without an invalid reconciler.toml says so.
func TestInvalidSettings(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "reconciler.toml")
	assert.NoError(t, os.WriteFile(file, []byte("backend = \"x\"\n"), 0o644))
	n, _ := inspectNode(t, "--config", file, "--data-dir", filepath.Join(t.TempDir(), "none"))
	if want := "from the defaults and flags"; n.settingsFrom != want || n.SettingsErr == nil {
		t.Errorf("settings %q, want %q (%v)", n.settingsFrom, want, n.SettingsErr)
	}
}
