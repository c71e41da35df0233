// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster && e2e_kubernetes

package cluster_test

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
)

// The ranges that every policy exempts but that of the negative control.
const (
	exemptRanges  = `"10.244.0.0/16", "10.96.0.0/16", "192.168.100.0/24"`
	exemptRanges6 = `"fd00:244::/48", "fd00:96::/112", "fd00:100::/64"`
	strictKeys    = `"guard": "drop", "staleConnections": "reset", "enforceExempt": true, "nonMasqueradeNamespaces": ["kube-system"]`
)

// Tests that depend on masquerading, by parts of their names.
const (
	internet     = `should provide Internet connection|should provider Internet connection`
	sourceOfPods = `without SNAT|should preserve source pod IP`
)

// testAreas are the tests that run, by the beginnings of their names.
func testAreas() []string {
	return []string{"Networking", "Services", "Conntrack", "HostPort", "NoSNAT", "DNS", "Connectivity Pod Lifecycle"}
}

// leftOut has the tests that do not run, by parts of their names. docs/compatibility.md has the reasons.
const leftOut = `SCTP|LoadBalancer|evicted pods`

// networkColumns are the clusters in which the tests run.
func networkColumns() []networkColumn {
	exempt := `"nonMasqueradeCIDRs": [` + exemptRanges + `]`
	return []networkColumn{
		{name: "without", proxy: "iptables", fail: internet},
		{name: "nftables", proxy: "iptables", entry: `"backend": "nftables", ` + exempt},
		{name: "iptables-strict", proxy: "iptables", entry: `"backend": "iptables", "podCIDRs": ["10.244.0.0/16"], ` + strictKeys + `, ` + exempt},
		{name: "nftables-strict", proxy: "nftables", entry: `"backend": "nftables", "podCIDRs": ["10.244.0.0/16"], ` + strictKeys + `, ` + exempt},
		{name: "dual-stack", proxy: "nftables", dualStack: true, entry: `"backend": "nftables", "enableIPv6": true, ` +
			`"podCIDRs": ["10.244.0.0/16", "fd00:244::/48"], ` + strictKeys + `, "nonMasqueradeCIDRs": [` + exemptRanges + `, ` + exemptRanges6 + `]`},
		{name: "negative", proxy: "iptables", entry: `"backend": "nftables", "nonMasqueradeCIDRs": []`, only: sourceOfPods, fail: sourceOfPods},
	}
}

// networkColumn is a cluster in which the tests run.
type networkColumn struct {
	name, proxy string
	dualStack   bool
	// entry has the keys of the plugin entry; without it, ip-masq is not installed.
	entry string
	// only is a part of the names of the tests to run, in place of testAreas.
	only string
	// fail is a part of the names of the tests that have to fail.
	fail string
}

// networkOverlay sets a plugin entry and its backend, and serves metrics.
const networkOverlay = `components:
- COMPONENTS/metrics
configMapGenerator:
- name: ip-masq
  namespace: kube-system
  behavior: merge
  literals:
  - 'entry.json={"type": "ip-masq", %s}'
patches:
- target: {kind: DaemonSet}
  patch: |
    - op: replace
      path: /spec/template/spec/containers/0/env/0/value
      value: %s
`

// TestNetworkTests runs the network tests of Kubernetes, unmodified.
func TestNetworkTests(t *testing.T) {
	tests := cluster.FindNetworkTests(t)
	for _, column := range networkColumns() {
		t.Run(column.name, func(t *testing.T) { column.run(t, tests) })
	}
}

func (column networkColumn) run(t *testing.T, tests *cluster.NetworkTests) {
	c := newCluster(t, cluster.Options{ProxyMode: column.proxy, DualStack: column.dualStack, Internet: true})
	if column.entry != "" {
		directory, backend := "base", "nftables"
		if strings.Contains(column.entry, `"iptables"`) {
			directory, backend = "overlays/iptables", "iptables"
		}
		c.ApplyOverlay(t, fmt.Sprintf(networkOverlay, column.entry, backend), directory)
		awaitRollout(t, c, "ip-masq")
		for _, n := range c.Nodes {
			awaitReadyz(t, n)
		}
	}
	tests.StartDNS(t, c)

	began := time.Now()
	ran := tests.Run(t, c, column.name, column.options()...)
	duration := time.Since(began)
	mayFail := regexp.MustCompile(column.fail)
	states := map[string]int{}
	passed := ""
	for _, test := range ran {
		expected := column.fail != "" && mayFail.MatchString(test.Name)
		state := test.State
		switch {
		case state == "passed" && !expected:
			passed += test.Name + "\n"
			if test.Attempts > 1 {
				state = "passed in the second attempt"
				t.Logf("%s: %s", state, test.Name)
			}
		case state == "passed":
			t.Errorf("passed, has to fail: %s", test.Name)
		case state == "skipped":
			t.Logf("skipped: %s: %s", test.Name, test.Message)
		case expected:
			state = "failed as it has to"
		default:
			t.Errorf("%s: %s: %s", state, test.Name, test.Message)
		}
		states[state]++
	}
	if column.fail != "" && states["failed as it has to"] == 0 {
		t.Errorf("no test failed that has to: %s", column.fail)
	}
	for _, area := range testAreas() {
		if column.only == "" && !strings.Contains(passed, "[sig-network] "+area) {
			t.Errorf("no test passed of %s", area)
		}
	}
	t.Logf("%v in %.1f minutes", states, duration.Minutes())
	var metrics []string
	if column.entry != "" {
		metrics = append(metrics, "ip_masq_drift_repairs_total")
	}
	if strings.Contains(column.entry, `"guard"`) {
		metrics = append(metrics, "ip_masq_guard_packets_total")
	}
	for _, metric := range metrics {
		for _, n := range c.Nodes {
			assert.Equal(t, metric+" on "+n.Name, sumOf(t, n, metric), 0)
		}
	}
}

// options returns the options of ginkgo that select the column's tests.
func (column networkColumn) options() []string {
	features := "Networking-IPv4, Networking-DNS"
	areas := strings.Join(testAreas(), "|")
	if column.dualStack {
		features += ", Networking-IPv6, IPv6DualStack"
		areas += `|\[Feature:IPv6DualStack\]`
	}
	focus := `\[sig-network\] (` + areas + ")"
	if column.only != "" {
		focus = column.only
	}
	return []string{
		"--focus=" + focus, "--skip=" + leftOut,
		"--label-filter=!Slow && !Serial && !Disruptive && !Flaky && Feature: isSubsetOf {" + features + "}",
	}
}

// sumOf returns the sum of a metric's values on a node.
func sumOf(t *testing.T, n *cluster.Node, metric string) (sum float64) {
	t.Helper()
	text := assert.Must(n.Metrics(t.Context()))(t)
	found := false
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); strings.HasPrefix(line, metric+"{") {
			sum += assert.Must(strconv.ParseFloat(fields[len(fields)-1], 64))(t)
			found = true
		}
	}
	if !found {
		t.Errorf("%s has no metric %s:\n%s", n.Name, metric, text)
	}
	return sum
}
