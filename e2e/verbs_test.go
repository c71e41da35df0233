// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
)

// results returns results of a previous plugin with fields that no CNI library knows.
func results() map[string]string {
	odd := `"big": 123456789012345678901234567890, "small": 1.000000000000000000001, "wide": 1e400,
		"text": "<&> \u2028 \u00e9 \"", "nothing": null, "deep": {"b": [1, {"a": 18446744073709551616}], "a": true}`
	ips := `"ips": [{"version": "4", "address": "10.1.0.2/16", "gateway": "10.1.0.1", "interface": 0, "mark": 7, ` + odd + `}],
		"interfaces": [{"name": "eth0", "mac": "00:11:22:33:44:55", "sandbox": "/run/netns/x", "pciID": "0000:00:1f.6", ` + odd + `}],
		"routes": [{"dst": "0.0.0.0/0", "table": 4294967296, "priority": 1}], "dns": {"nameservers": ["10.1.0.1"], "x": 1}, ` + odd
	old := `"ip4": {"ip": "10.1.0.2/16", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}], ` + odd + `}, "dns": {}, ` + odd
	return map[string]string{"0.1.0": old, "0.2.0": old, "0.3.0": ips, "0.3.1": ips, "0.4.0": ips, "1.0.0": ips, "1.1.0": ips}
}

// TestResultPassesThrough checks that ADD returns the prevResult unchanged, with every digit of its
// numbers.
func TestResultPassesThrough(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	for version, result := range results() {
		t.Run(version, func(t *testing.T) {
			given := fmt.Sprintf(`{"cniVersion": %q, %s}`, version, result)
			conf := n.conf(t, "podnet", object{"cniVersion": version, "prevResult": json.RawMessage(given)})
			a := n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
			a.noWarnings(t)
			wantSame(t, "the result", exactly(t, a.stdout), exactly(t, given))
		})
	}
	t.Run("deeply nested", func(t *testing.T) { // indented output would need 4 bytes per item and level
		const levels, items = 1000, 1000
		given := fmt.Sprintf(`{"cniVersion": "1.1.0", "x": %s%s1%s}`, strings.Repeat("[", levels), strings.Repeat("1,", items), strings.Repeat("]", levels))
		conf := n.conf(t, "podnet", object{"cniVersion": "1.1.0", "prevResult": json.RawMessage(given)})
		if a := n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0); len(a.stdout) > 2*len(given) {
			t.Errorf("a result of %d bytes is answered with %d", len(given), len(a.stdout))
		}
	})
	t.Run("no version anywhere", func(t *testing.T) {
		given := "{" + results()["0.1.0"] + "}"
		conf := n.conf(t, "podnet", object{"cniVersion": nil, "prevResult": json.RawMessage(given)})
		a := n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
		want := exactly(t, given).(object)
		want["cniVersion"] = "0.1.0" // the default of a configuration without cniVersion
		wantSame(t, "the result", exactly(t, a.stdout), any(want))
	})
	t.Run("another version", func(t *testing.T) {
		conf := n.conf(t, "podnet", object{"cniVersion": "0.4.0"}) // the prevResult has 1.1.0
		a := n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
		want := `{"cniVersion": "0.4.0", "interfaces": [{"name": "eth0", "sandbox": "/run/netns/container"}],
			"ips": [{"version": "4", "interface": 0, "address": "10.1.0.2/16"}], "dns": {}}`
		wantSame(t, "the result", exactly(t, a.stdout), exactly(t, want))
	})
}

// exactly decodes JSON and keeps every digit of its numbers.
func exactly(t *testing.T, text string) any {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	if d.More() {
		t.Fatalf("more than one result:\n%s", text)
	}
	return v
}

// TestMissingPrevResult checks that ADD fails and changes nothing without a valid prevResult.
func TestMissingPrevResult(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	before := n.snapshot(t)
	const seePlugin = "; see what the plugin before ip-masq in the conflist returns"
	for name, c := range map[string]struct {
		prev any
		says string
	}{
		"absent":             {nil, "is missing; ip-masq runs after the plugin that makes the interface: list it behind that one in the conflist's plugins"},
		"null":               {json.RawMessage("null"), "is missing; ip-masq runs after the plugin that makes the interface: list it behind that one in the conflist's plugins"},
		"a list":             {[]int{1}, "is not a result of cniVersion 1.1.0: it has the JSON type array" + seePlugin},
		"empty":              {object{}, "is not a result of cniVersion 1.1.0: it has no cniVersion" + seePlugin},
		"an invalid version": {object{"cniVersion": 1}, "is not a result of cniVersion 1.1.0: cniVersion has the JSON type number" + seePlugin},
		"an unknown version": {object{"cniVersion": "7.0.0"}, `is not a result of cniVersion 7.0.0: unsupported CNI result version "7.0.0"` + seePlugin},
		"an invalid address": {object{"cniVersion": "1.1.0", "ips": []object{{"address": "10.1.0.300/16"}}},
			"is not a result of cniVersion 1.1.0: invalid CIDR address: 10.1.0.300/16" + seePlugin},
		"an invalid type": {object{"cniVersion": "1.1.0", "ips": object{}}, "is not a result of cniVersion 1.1.0: ips has the JSON type object" + seePlugin},
		"null in a list of another version": {object{"cniVersion": "0.4.0", "interfaces": []any{nil}},
			"convert from cniVersion 0.4.0 to 1.1.0: an item of interfaces, ips or routes is null" + seePlugin},
		"a long text": {object{"cniVersion": "1.1.0", "ips": []object{{"address": strings.Repeat("x", 100000)}}}, "is not a result of cniVersion 1.1.0: "},
	} {
		t.Run(name, func(t *testing.T) {
			a := n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", object{"prevResult": c.prev})}).want(t, 7, "prevResult: "+c.says)
			if len(a.msg) > 512 {
				t.Errorf("a message of %d bytes", len(a.msg))
			}
			n.unchanged(t, before)
		})
	}
}

// TestChainedPlugins runs ADD, CHECK and DEL between two reference plugins, with each cniVersion
// that runtimes use.
func TestChainedPlugins(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			list, err := json.Marshal(object{"cniVersion": version, "name": "podnet", "plugins": []object{
				n.bridge("podnet"), n.entry(nil), {"type": "portmap", "capabilities": object{"portMappings": true}},
			}})
			must(t, err)
			must(t, n.cni.Write("10-podnet.conflist", string(list)))
			p := n.newPod(t)
			stdout, stderr, code := n.add(t, "podnet", p)
			if code != 0 || len(p.addrs) != 2 || !strings.Contains(stdout, `"cniVersion": "`+version+`"`) {
				t.Fatalf("ADD: exit code %d, %d addresses\n%s%s", code, len(p.addrs), stdout, stderr)
			}
			if stdout, stderr, code := n.check(t, "podnet", p); version != "0.3.1" && code != 0 { // 0.3.1 has no CHECK
				t.Errorf("CHECK: exit code %d\n%s%s", code, stdout, stderr)
			}
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
			succeeds(t, "DEL")(n.del(t, "podnet", p))
			n.wantAttachments(t, "podnet", 0)
		})
	}
}

// TestCheckIsReadOnly checks that CHECK creates neither rules nor documents, also in an empty dataDir, as
// one that is a mount point is after cleanup.
func TestCheckIsReadOnly(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	must(t, os.Mkdir(n.dataDir, 0o700))
	before := n.snapshot(t)
	n.invoke(t, invocation{verb: "CHECK", conf: n.conf(t, "podnet", nil)}).want(t, 101, "has no document")
	n.unchanged(t, before)
}

// TestDel checks that DEL succeeds whatever happened to the pod, its entry or the node: a runtime
// repeats a failed DEL, and the pod never ends.
func TestDel(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "172.16.0.0/12"}})
		n.addAndCheck(t, conf)
		rules := n.ruleset(t)
		succeeds := func(t *testing.T, r invocation, msgs ...string) result {
			t.Helper()
			r.verb = "DEL"
			a := n.invoke(t, r).want(t, 0, msgs...)
			wantSame(t, "stdout", a.stdout, "")
			return a
		}
		t.Run("twice", func(t *testing.T) {
			for want := range 2 {
				n.invoke(t, invocation{verb: "ADD", conf: conf, id: "pod1"}).want(t, 0)
				n.invoke(t, invocation{verb: "ADD", conf: conf, id: "pod2"}).want(t, 0)
				n.wantAttachments(t, "podnet", 3)
				for _, id := range []string{"pod1", "pod1", "pod2", "pod2"}[:4-want] {
					succeeds(t, invocation{conf: conf, id: id}).noWarnings(t)
				}
				n.wantAttachments(t, "podnet", 1)
			}
		})
		t.Run("after a failed ADD", func(t *testing.T) { // no namespace, no prevResult, no attachment
			r := invocation{conf: n.conf(t, "podnet", object{"prevResult": nil}), id: "never", noNetns: true}
			succeeds(t, r).noWarnings(t)
		})
		t.Run("unknown network", func(t *testing.T) {
			succeeds(t, invocation{conf: n.conf(t, "othernet", nil)}).noWarnings(t)
		})
		t.Run("with a stale entry", func(t *testing.T) {
			for _, keys := range []object{
				{"nonMasqueradeCIDRs": []string{}}, {"masqChain": "OLD"}, {"enableIPv6": true},
			} {
				succeeds(t, invocation{conf: n.conf(t, "podnet", keys)}).noWarnings(t)
			}
		})
		if after := n.ruleset(t); after != rules {
			t.Fatalf("rules changed:\n%s\nwere:\n%s", after, rules)
		}
		for name, keys := range map[string]object{
			"with a bad CIDR":          {"nonMasqueradeCIDRs": []string{"10.0.0.1/8"}},
			"with an unknown key":      {"nonmasqueradecidrs": 1},
			"with keys of wrong types": {"enableIPv6": "yes", "cidrLimit": -1, "backend": "ebpf"},
		} {
			t.Run(name, func(t *testing.T) { // DEL repairs the rules nevertheless
				n.flush(t)
				succeeds(t, invocation{conf: n.conf(t, "podnet", keys)}).noWarnings(t)
				n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
			})
		}
		t.Run("with a broken backend", func(t *testing.T) {
			n.flush(t)
			before := n.ruleset(t)
			succeeds(t, invocation{conf: conf, unprivileged: true}, "warning: ")
			wantSame(t, "rules", n.ruleset(t), before)
			a := succeeds(t, invocation{conf: conf, path: "/nonexistent"})
			if n.backend.variant == "" { // nftables needs no program
				n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
			} else if !strings.Contains(a.stderr, `PATH "/nonexistent"`) || !strings.Contains(a.stderr, "install iptables") {
				t.Errorf("stderr: %s", a.stderr)
			}
		})
		t.Run("with no state", func(t *testing.T) {
			n.addAndCheck(t, conf)
			for _, clean := range []bool{false, true} { // with and without rules
				if clean {
					n.flush(t)
				}
				must(t, os.RemoveAll(n.dataDir))
				before := n.snapshot(t)
				succeeds(t, invocation{conf: conf}).noWarnings(t)
				n.unchanged(t, before)
				if _, err := os.Lstat(n.dataDir); !os.IsNotExist(err) {
					t.Errorf("DEL created the dataDir: %v", err)
				}
			}
		})
	})
}
