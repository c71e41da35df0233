// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// statusTime is when the statuses of the tests are printed.
var statusTime = time.Date(2026, 11, 22, 3, 4, 5, 0, time.UTC)

func ago(d time.Duration) time.Time { return statusTime.Add(-d) }

func chainOf(name string, f policy.Family, backend string, rules int, connections map[string]uint64) chainStatus {
	at := policy.ChainFamily{Chain: name, Family: f}
	return chainStatus{ChainCount: metrics.ChainCount{ChainFamily: at, Connections: connections}, Backend: backend, Rules: rules}
}

// healthyStatus returns the status of a node that is ready.
func healthyStatus() *nodeStatus {
	network, agent := policy.SourceID{Kind: policy.Network, Name: "podnet"}, policy.SourceID{Kind: policy.AgentFiles}
	pid, version := 1, "v0.1.0"
	return &nodeStatus{
		Ready: true,
		Reconciler: reconcilerStatus{
			activeReconciler: activeReconciler{Running: true, Answers: true, PID: &pid, Version: &version},
			Started:          ago(75 * time.Hour),
		},
		Plugin:       pluginStatus{Path: "/opt/cni/bin/ip-masq", Version: "v0.1.0"},
		SettingsFrom: "from the reconciler that runs (pid 1, version v0.1.0)",
		Settings: []config.Setting{
			{Key: "resync_interval", Value: "1m0s", Origin: config.DefaultOrigin},
			{Key: "agent_config_dir", Value: "/etc/config", Origin: config.FlagOrigin},
			{Key: "metrics_listen", Value: ":9820", Origin: "/etc/ip-masq/reconciler.toml:3"},
			{Key: "data_dir", Value: "/var/lib/cni/ip-masq", Origin: config.DefaultOrigin},
		},
		DataDir: "/var/lib/cni/ip-masq",
		Chains: []chainStatus{
			chainOf("IP-MASQ-AGENT", policy.IPv4, "iptables (nft)", 6, map[string]uint64{"masquerade": 1234567, "exempt": 99820}),
			chainOf("IP-MASQ-AGENT", policy.IPv6, "iptables (nft)", 3, map[string]uint64{"masquerade": 17, "exempt": 0}),
		},
		Programs: []programStatus{
			{Backend: "iptables (nft)", Family: policy.IPv4, Path: "/usr/sbin/iptables-nft", Version: "1.8.9"},
			{Backend: "iptables (nft)", Family: policy.IPv6, Path: "/usr/sbin/ip6tables-nft", Version: "1.8.9"},
		},
		Sources: []sourceStatus{
			{network, "in force", ago(75 * time.Hour), []string{"/etc/cni/net.d/10-podnet.conflist"}},
			{agent, "in force", ago(3*time.Hour + 12*time.Minute), []string{"/etc/config/ip-masq-agent"}},
		},
		Pods:     podsStatus{Recorded: 23},
		Conflist: conflistStatus{Network: "podnet", File: "/etc/cni/net.d/10-podnet.conflist", Entry: true},
	}
}

// brokenStatus returns the status of a node with most that can be wrong.
func brokenStatus() *nodeStatus {
	s := healthyStatus()
	s.Ready = false
	s.Plugin = pluginStatus{Path: s.Plugin.Path, Error: "/opt/cni/bin/ip-masq is missing"}
	s.Chains[0].Guard, s.Chains[0].EnforceExempt, s.Chains[0].Resets = policy.GuardDrop, true, 3
	s.Chains[0].GuardPackets = map[string]uint64{"drop": 41}
	s.Chains = append(s.Chains, chainOf(strings.Repeat("X", 24), policy.IPv4, "iptables (legacy)", 65536,
		map[string]uint64{"masquerade": 12345678901, "exempt": 12345678901}))
	s.Sources[1].State = "invalid"
	s.Sources = append(s.Sources, sourceStatus{policy.SourceID{Kind: policy.Network, Name: strings.Repeat("n", 90)}, "superseded", time.Time{}, nil})
	for i := range 6 {
		s.Sources[1].Files = append(s.Sources[1].Files, fmt.Sprintf("/etc/config/ip-masq-agent-%d", i))
	}
	s.Conflist.Entry, s.Conflist.Managed = false, true
	s.RepairsTotal = 31
	s.Repairs = []metrics.Repair{{At: ago(2 * time.Second), By: `"iptables" (host pid 4711)`, Chains: []string{"IP-MASQ-AGENT"}, Missing: 6}}
	s.Findings = append(faultFindings([]reconcile.Problem{
		{Reason: reconcile.ReasonSource, Err: errors.New("/etc/config/ip-masq-agent:1: nonMasqueradeCIDRs[2]: 10.0.1.24/24 has host bits set")},
		{Reason: reconcile.ReasonFlapping, Err: errors.New(`another program reverts the rules repeatedly, most likely "iptables" (host pid 4711)`)},
		{Reason: reconcile.ReasonRules, Chain: "IP-MASQ-AGENT", Err: errors.New("first line\nsecond line")},
	}), foundStatus()...)
	return s
}

// foundStatus returns findings that are no faults.
func foundStatus() []diagnose.Finding {
	return []diagnose.Finding{
		{
			ID: "foreign-masquerade", Severity: diagnose.SeverityProblem, Cause: "Third-party rules masquerade destinations that the policy exempts.",
			Details: []string{
				"nftables, ipv4, table other, chain post: ip daddr 10.0.0.0/8 masquerade: applies to 10.0.0.0/8, which IP-MASQ-AGENT exempts", "b", "c", "d", "e", "f",
			},
			Remedy: "Switch masquerading off in the program that writes the rules. If you only remove them, it may write them again at its next start.",
		},
		{ID: "agent-running", Severity: diagnose.SeverityNotice},
		{ID: "mixed-variants", Severity: diagnose.SeverityNotice},
	}
}

// TestStatusText compares the screen with the files in testdata/status.
func TestStatusText(t *testing.T) {
	t.Parallel()
	none := healthyStatus()
	none.Ready, none.Reconciler = false, reconcilerStatus{LastSeen: ago(26 * time.Hour)}
	none.SettingsFrom = "from /etc/ip-masq/reconciler.toml"
	for i := range none.Chains {
		none.Chains[i].Connections = nil
	}
	silent := healthyStatus()
	silent.Ready, silent.SettingsFrom = false, "from the defaults"
	silent.Reconciler = reconcilerStatus{activeReconciler: activeReconciler{Running: true}, Error: "no answer in 2s"}
	found := healthyStatus()
	found.Findings, found.Pods = foundStatus(), podsStatus{Recorded: 12, Exempt: 3, WithoutRecord: 1, listed: true}
	nothing := &nodeStatus{
		Plugin: pluginStatus{Error: "/opt/cni/bin/ip-masq is missing"}, SettingsFrom: "from the defaults", DataDir: "/var/lib/cni/ip-masq",
		Conflist: conflistStatus{Error: "find the network in /etc/cni/net.d: no network there yet"},
	}
	agentFiles := healthyStatus()
	agentFiles.Pods = podsStatus{Recorded: 4, listed: true}
	agentFiles.Plugin, agentFiles.Conflist, agentFiles.Sources = pluginStatus{Path: agentFiles.Plugin.Path}, conflistStatus{}, agentFiles.Sources[1:]
	unread := &nodeStatus{
		unread: true, Findings: faultFindings([]reconcile.Problem{{Reason: reconcile.ReasonState, Err: errors.New("open directory /var/lib/cni/ip-masq: refused: bad")}}),
		SettingsFrom: "from the defaults", DataDir: "/var/lib/cni/ip-masq",
		Reconciler: reconcilerStatus{activeReconciler: activeReconciler{Running: true}, Error: "open directory /var/lib/cni/ip-masq: refused: bad"},
		Plugin:     healthyStatus().Plugin, Conflist: healthyStatus().Conflist,
	}
	for name, s := range map[string]*nodeStatus{
		"agent-files": agentFiles, "unread": unread, "healthy": healthyStatus(), "broken": brokenStatus(), "none-runs": none, "no-answer": silent, "findings": found, "nothing": nothing,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			golden.Check(t, filepath.Join("testdata", "status", name+".txt"), s.text(statusTime))
		})
	}
	for _, width := range []int{80, 100} {
		text := wrapped(brokenStatus().text(statusTime), width, labelWidth)
		golden.Check(t, filepath.Join("testdata", "status", fmt.Sprintf("broken-%d.txt", width)), text)
		if got, want := strings.Fields(text), strings.Fields(brokenStatus().text(statusTime)); !slices.Equal(got, want) {
			t.Errorf("wrapped at %d, the screen has the words %q, want %q", width, got, want)
		}
	}
	if n := strings.Count(healthyStatus().text(statusTime), "\n"); n > 20 {
		t.Errorf("a healthy node has %d lines, more than 20", n)
	}
}
