// SPDX-License-Identifier: Apache-2.0

package cniplugin_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/testutils"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const (
	chain            = policy.DefaultChain
	validAttachments = "cni.dev/valid-attachments"
)

// unknownKeys are keys that no CNI library knows, whose numbers no float has.
const unknownKeys = `"big": 123456789012345678901234567890, "small": 1.000000000000000000001,
	"wide": 1e400, "text": "<&> \u2028 \u00e9 \"", "nothing": null,
	"deep": {"b": [1, {"a": 18446744073709551616}], "a": true}`

// resultOf returns the result that a main plugin of a version of the specification passes on, and the pod's
// subnets in it.
func resultOf(version string) (result, subnets string) {
	if !testutils.SpecVersionHasChaining(version) { // 0.1.0 and 0.2.0 have an address for each family
		result = fmt.Sprintf(`{"cniVersion": %q,
			"ip4": {"ip": "10.1.0.2/16", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}], %s},
			"ip6": {"ip": "fd00:1::2/64"}, "dns": {}, %[2]s}`, version, unknownKeys)
		return result, "[10.1.0.0/16 fd00:1::/64]"
	}
	ipVersion := ""
	if testutils.SpecVersionHasIPVersion(version) {
		ipVersion = `"version": "4", `
	}
	result = fmt.Sprintf(`{"cniVersion": %q,
		"ips": [{%s"address": "10.1.0.2/16", "gateway": "10.1.0.1", "interface": 1, "mark": 7, %[3]s}],
		"interfaces": [
			{"name": "cni0"},
			{"name": "eth0", "mac": "00:11:22:33:44:55", "sandbox": "/run/netns/x", %[3]s}
		],
		"routes": [{"dst": "0.0.0.0/0", "table": 4294967296, "priority": 1}],
		"dns": {"nameservers": ["10.1.0.1"], "x": 1}, %[3]s}`, version, ipVersion, unknownKeys)
	return result, "[10.1.0.0/16]"
}

// TestEveryVersion runs the verbs that each version of the specification has, in the order of a pod's life.
func TestEveryVersion(t *testing.T) {
	for _, version := range testutils.AllSpecVersions {
		t.Run(version, func(t *testing.T) {
			h := newHost(t)
			result, subnets := resultOf(version)
			keys := object{"cniVersion": version, "prevResult": json.RawMessage(result)}
			conf := h.conf("podnet", keys)
			ofNoPod := h.conf("podnet", object{"cniVersion": version, "prevResult": nil})
			if testutils.SpecVersionHasSTATUS(version) {
				h.call(call{verb: "STATUS", conf: ofNoPod}).want(0).clean()
				assert.Equal(t, "chains after STATUS", len(h.chains()), 0)
			}
			for range 2 { // the second one finds all as it should be
				a := h.call(call{verb: "ADD", conf: conf}).want(0).clean()
				assert.Equal(t, "result", exactly(t, string(a.stdout)), exactly(t, result))
			}
			assert.Equal(t, "chains", h.chains(), []string{chain})
			assert.Equal(t, "subnets", fmt.Sprint(h.stored("podnet").PodSubnets), subnets)
			h.wantAttachments("podnet", 1)

			if testutils.SpecVersionHasCHECK(version) {
				h.call(call{verb: "CHECK", conf: conf}).want(0).clean()
				h.kernel.Flush()
				h.call(call{verb: "CHECK", conf: conf}).want(101, chain, "missing")
			}
			h.kernel.Flush()
			if testutils.SpecVersionHasSTATUS(version) { // as GC
				h.call(call{verb: "GC", conf: ofNoPod}).want(0).clean()
				assert.Equal(t, "chains after GC", h.chains(), []string{chain})
				h.kernel.Flush()
			}
			for range 2 {
				h.call(call{verb: "DEL", conf: conf}).want(0).clean()
				assert.Equal(t, "chains after DEL", h.chains(), []string{chain})
				h.wantAttachments("podnet", 0)
			}
		})
	}
}

// exactly decodes JSON and keeps every digit of its numbers.
func exactly(t *testing.T, text string) any {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var v any
	assert.NoError(t, d.Decode(&v))
	if d.More() {
		t.Fatalf("more than one result:\n%s", text)
	}
	return v
}

// TestResultPassesThrough: the result of ADD is the prevResult, in the version of the configuration.
func TestResultPassesThrough(t *testing.T) {
	h := newHost(t)
	add := func(keys object) string {
		return string(h.call(call{verb: "ADD", conf: h.conf("podnet", keys)}).want(0).stdout)
	}
	h.run("deeply nested", func(t *testing.T) { // indented output would need 4 bytes per item and level
		const levels, items = 1000, 1000
		given := `{"cniVersion": "1.1.0", "x": ` +
			strings.Repeat("[", levels) + strings.Repeat("1,", items) + "1" + strings.Repeat("]", levels) + "}"
		if out := add(object{"prevResult": json.RawMessage(given)}); len(out) > 2*len(given) {
			t.Errorf("a result of %d bytes is answered with %d", len(given), len(out))
		}
	})
	h.run("no version anywhere", func(t *testing.T) {
		given, _ := resultOf("0.1.0")
		want := exactly(t, given).(map[string]any)
		given = strings.Replace(given, `"cniVersion": "0.1.0", `, "", 1)
		// The default of a configuration without cniVersion is 0.1.0.
		out := add(object{"cniVersion": nil, "prevResult": json.RawMessage(given)})
		assert.Equal(t, "result", exactly(t, out), any(want))
	})
	h.run("another version", func(t *testing.T) {
		want := `{"cniVersion": "0.4.0", "interfaces": [{"name": "eth0", "sandbox": "/run/netns/container"}],
			"ips": [{"version": "4", "interface": 0, "address": "10.1.0.2/16"}], "dns": {}}`
		out := add(object{"cniVersion": "0.4.0"}) // the prevResult has 1.1.0
		assert.Equal(t, "result", exactly(t, out), exactly(t, want))
	})
}

// TestMissingPrevResult: ADD fails and changes nothing without a valid prevResult.
func TestMissingPrevResult(t *testing.T) {
	h := newHost(t)
	h.add("podnet", nil)
	before := h.snapshot()
	const seePlugin = "; see what the plugin before ip-masq in the conflist returns"
	const isMissing = "is missing; ip-masq runs after the plugin that makes the interface: " +
		"list it behind that one in the conflist's plugins"
	const isNone = "is not a result of cniVersion 1.1.0: "
	for name, c := range map[string]struct {
		given any
		says  string
	}{
		"absent":             {nil, isMissing},
		"null":               {json.RawMessage("null"), isMissing},
		"a list":             {[]int{1}, isNone + "it has the JSON type array" + seePlugin},
		"empty":              {object{}, isNone + "it has no cniVersion" + seePlugin},
		"an invalid version": {object{"cniVersion": 1}, isNone + "cniVersion has the JSON type number" + seePlugin},
		"an unknown version": {
			object{"cniVersion": "7.0.0"},
			`is not a result of cniVersion 7.0.0: unsupported CNI result version "7.0.0"` + seePlugin,
		},
		"an invalid address": {
			object{"cniVersion": "1.1.0", "ips": []object{{"address": "10.1.0.300/16"}}},
			isNone + "invalid CIDR address: 10.1.0.300/16" + seePlugin,
		},
		"an invalid type": {
			object{"cniVersion": "1.1.0", "ips": object{}},
			isNone + "ips has the JSON type object" + seePlugin,
		},
		"null in a list of another version": {
			object{"cniVersion": "0.4.0", "interfaces": []any{nil}},
			"convert from cniVersion 0.4.0 to 1.1.0: " +
				"an item of interfaces, ips or routes is null" + seePlugin,
		},
		"a long text": {
			object{"cniVersion": "1.1.0", "ips": []object{{"address": strings.Repeat("x", 100000)}}},
			isNone,
		},
	} {
		h.run(name, func(t *testing.T) {
			conf := h.conf("podnet", object{"prevResult": c.given})
			a := h.call(call{verb: "ADD", id: "newcomer", conf: conf}).want(7, "prevResult: "+c.says)
			if len(a.msg) > 512 {
				t.Errorf("a message of %d bytes", len(a.msg))
			}
			assert.Equal(t, "state", h.snapshot(), before)
		})
	}
}

// badEntry is an invalid value of a key, and what the message must have.
type badEntry struct {
	key   string
	value any // marshaled to JSON
	says  string
}

// badEntries has values of each type of key. Tests of package config have the messages.
func badEntries() []badEntry {
	entries := []badEntry{
		{"nonMasqueradeCidrs", []string{}, "is not a known key; did you mean nonMasqueradeCIDRs?"},
		{strings.Repeat("k", 5000), 1, `…": is not a known key; remove it`},
		{"requireAgentConfig", "False", `requireAgentConfig: "False" is a string; write true or false`},
		{"cidrLimit", 1000001, `cidrLimit: 1000001 is not a whole number from 1 to 1000000`},
		{"masqChain", "A\n-F", `masqChain: "A\n-F" may hold only letters, digits`},
		{"dataDir", "etc", `dataDir: etc is relative`},
	}
	raw := func(text string) json.RawMessage { return json.RawMessage(text) }
	for _, k := range policytest.Keys() {
		var values []any
		switch k.Field.(type) {
		case **bool:
			values = []any{"true", 1, object{}}
		case *[]netip.Prefix, *policy.AddressItems:
			values = []any{
				[]string{"10.0.1.24/24"}, []string{"fd00::/8"}, []string{"10.5.0.0/16", ""},
				raw(`["10.5.0.0/16", null]`), raw(`[10]`), "10.0.0.0/8",
			}
		case *[]string:
			values = []any{
				[]string{"eth0", "+"}, []string{"a -j ACCEPT"}, []string{"sixteen-letters-"}, []string{""},
			}
		case *policy.Namespaces:
			values = []any{
				[]string{"prod", "Prod"}, []string{"a.b"}, []string{"-a"}, []string{"prod-*"}, []string{""}, "prod",
			}
		case **policy.Ports:
			values = []any{"0-100", "1-100,50-200", "1024,", 8080}
		default:
			values = []any{"no value", 24576, []string{}}
		}
		for _, value := range append(values, raw("null")) {
			entries = append(entries, badEntry{k.Name, value, k.Name})
		}
	}
	return entries
}

// TestBadInput: each invalid key is error 7 of ADD and CHECK, and 50 of STATUS, with key, item, value and
// remedy. Neither rules nor state change. DEL and GC pass.
func TestBadInput(t *testing.T) {
	fresh := newHost(t)
	bad := fresh.conf("podnet", object{"masqueradeCIDRs": []string{"10.0.0.1/8"}, "enableIPv6": true})
	fresh.call(call{verb: "ADD", conf: bad}).want(7)
	if _, err := os.Lstat(fresh.dataDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a refused entry makes a dataDir: %v", err)
	}
	h := newHost(t)
	h.add("podnet", nil)
	before := h.snapshot()
	for i, e := range badEntries() {
		h.run(fmt.Sprint(i, " ", e.key[:min(len(e.key), 30)]), func(t *testing.T) {
			conf := h.conf("podnet", object{e.key: e.value})
			a := h.call(call{verb: "ADD", id: "newcomer", conf: conf}).want(7, e.says)
			if strings.Contains(a.msg, "\n") || len(a.msg) > 1024 {
				t.Errorf("the message has several lines or more than 1024 bytes:\n%s", a.msg)
			}
			h.call(call{verb: "CHECK", conf: conf}).want(7, e.says)
			h.call(call{verb: "STATUS", conf: conf}).want(50, "ip-masq: ", e.says)
			if e.key != "dataDir" { // DEL and GC of another one do not see this network
				h.call(call{verb: "GC", conf: conf}).want(0).clean()
				h.call(call{verb: "DEL", id: "newcomer", conf: conf}).want(0).clean()
			}
			assert.Equal(t, "state", h.snapshot(), before)
		})
	}
}

// TestProtocolKeys: the plugin accepts the keys that the CNI protocol and runtimes add.
func TestProtocolKeys(t *testing.T) {
	h := newHost(t)
	h.add("podnet", object{
		"runtimeConfig": object{"portMappings": []int{}}, "capabilities": object{"bandwidth": true},
		"args": object{"cni": object{}}, "ipam": object{"type": "host-local"}, "dns": object{}, "ipMasq": false,
		validAttachments: json.RawMessage("null"), "cni.dev/anything": 1,
	})
}

// TestAttachmentBeforeDocuments: ADD records its attachment before it reads the documents, and not after it. So a reconciler that
// drops the network finds the attachment, or has done so by then.
func TestAttachmentBeforeDocuments(t *testing.T) {
	h := newHost(t)
	conf := h.conf("podnet", nil)
	h.call(call{verb: "ADD", id: "first", conf: conf}).want(0)
	sources := filepath.Join(h.store().Path(), "sources")
	assert.NoError(t, os.RemoveAll(sources))
	assert.NoError(t, os.Symlink(t.TempDir(), sources)) // so that reading fails
	h.call(call{verb: "ADD", id: "second", conf: conf}).want(7, "symbolic link")
	h.wantAttachments("podnet", 2)
}

// TestValidAttachments: GC removes the attachments of its network that the list does not have, and an absent
// list removes none.
func TestValidAttachments(t *testing.T) {
	h := newHost(t)
	for _, id := range []string{"a", "b", "c"} {
		h.call(call{verb: "ADD", id: id, conf: h.conf("podnet", nil)}).want(0).clean()
	}
	h.call(call{verb: "ADD", id: "d", conf: h.conf("othernet", nil)}).want(0).clean()
	for _, list := range []any{"all", object{"containerID": "a"}, []any{1}} {
		conf := h.conf("podnet", object{validAttachments: list})
		h.call(call{verb: "GC", conf: conf}).want(6, validAttachments)
		h.wantAttachments("podnet", 3)
	}
	for _, step := range []struct {
		name  string
		valid any
		left  int
	}{
		{"no list", nil, 3},
		{"two of three, and an unknown one", []object{
			{"containerID": "a", "ifname": "eth0"},
			{"containerID": "c", "ifname": "eth0"},
			{"containerID": "x", "ifname": "eth0"},
		}, 2},
		{"one with another interface", []object{
			{"containerID": "a", "ifname": "net1"},
			{"containerID": "c", "ifname": "eth0"},
		}, 1},
		{"an empty list", []object{}, 0},
	} {
		h.run(step.name, func(t *testing.T) {
			h.kernel.Flush()
			conf := h.conf("podnet", object{"prevResult": nil, validAttachments: step.valid})
			h.call(call{verb: "GC", conf: conf}).want(0).clean()
			assert.Equal(t, "chains", h.chains(), []string{chain})
			h.wantAttachments("podnet", step.left)
			h.wantAttachments("othernet", 1)
		})
	}
}

// TestNothingIsCreated: verbs that are no ADD make no state and no rules, also in an empty dataDir, as one
// that is a mount point is after cleanup.
func TestNothingIsCreated(t *testing.T) {
	h := newHost(t)
	for _, isThere := range []bool{false, true} {
		if isThere {
			assert.NoError(t, os.Mkdir(h.dataDir, 0o700))
		}
		before := h.snapshot()
		conf := h.conf("podnet", object{validAttachments: []object{}})
		h.call(call{verb: "CHECK", conf: conf}).want(101, "has no document")
		h.call(call{verb: "STATUS", conf: conf}).want(0).clean()
		h.call(call{verb: "GC", conf: conf}).want(0).clean()
		h.call(call{verb: "DEL", conf: conf}).want(0).clean()
		assert.Equal(t, "state", h.snapshot(), before)
	}
}

// TestChangedEntryConflicts: ADD refuses a changed entry that conflicts with another network, and keeps the
// stored one.
func TestChangedEntryConflicts(t *testing.T) {
	h := newHost(t)
	yes, no := object{"randomFully": true}, object{"randomFully": false}
	h.add("first", yes)
	h.add("second", nil) // agrees with everything
	h.add("first", object{"randomFully": true, "masqLinkLocal": true})
	h.add("first", yes)
	h.add("second", yes)
	before := h.snapshot()
	const says = `randomFully of network "first" is false, ` +
		`which conflicts with randomFully of network "second", true`
	h.call(call{verb: "STATUS", conf: h.conf("first", no)}).want(50, says)
	assert.Equal(t, "state after STATUS", h.snapshot(), before)
	h.call(call{verb: "ADD", conf: h.conf("first", no)}).want(7, says)
	assert.Equal(t, "stored randomFully", *h.stored("first").Policy.RandomFully, true)
}

// TestPodOfCNIArgs: the pod of an attachment is the one that CNI_ARGS names, and args on stdin name nobody.
func TestPodOfCNIArgs(t *testing.T) {
	for name, c := range map[string]struct{ args, want string }{
		"a pod":          {"IgnoreUnknown=1;K8S_POD_NAMESPACE=prod;K8S_POD_NAME=web-0", "prod/web-0"},
		"named twice":    {"K8S_POD_NAMESPACE=prod;K8S_POD_NAMESPACE=prod;K8S_POD_NAME=web-0", "prod/web-0"},
		"two namespaces": {"K8S_POD_NAMESPACE=prod;K8S_POD_NAMESPACE=dev;K8S_POD_NAME=web-0", "/web-0"},
		"no name":        {"K8S_POD_NAMESPACE=prod;K8S_POD_NAME=../x", "prod/"},
		"no pod":         {"", "/"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			conf := h.conf("podnet", object{"args": object{"cni": object{"K8S_POD_NAMESPACE": "stdin"}}})
			h.call(call{verb: "ADD", args: c.args, conf: conf}).want(0).clean()
			pods, without, err := h.store().Pods()
			assert.NoError(t, err)
			assert.Equal(t, "pods", len(pods), 1)
			assert.Equal(t, "attachments without a pod", without, 0)
			assert.Equal(t, "pod", pods[0].Namespace+"/"+pods[0].Name, c.want)
			assert.Equal(t, "addresses", fmt.Sprint(pods[0].Addresses), "[10.1.0.2]")
		})
	}
}

// TestRefusedState: an ADD that cannot write its state, as a file is refused, answers 7, as to an entry
// with a mistake, and changes no rule. STATUS fails, too, and DEL passes.
func TestRefusedState(t *testing.T) {
	for name, spoiled := range map[string]string{
		"the record of the pod": "attachments",
		"the lock":              "lock",
		"the dataDir":           "",
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.add("podnet", nil)
			path := filepath.Join(h.dataDir, spoiled)
			assert.NoError(t, os.Chmod(path, 0o777))
			changed := h.conf("podnet", object{"masqLinkLocal": true})
			generation := h.kernel.Generation
			h.call(call{verb: "ADD", id: "another", conf: changed}).want(7, path, "refused", "chmod go-w")
			h.call(call{verb: "STATUS", conf: changed}).want(50, path, "refused")
			h.call(call{verb: "DEL", id: "another", conf: changed}).want(0)
			if spoiled == "" {
				h.call(call{verb: "CHECK", conf: changed}).want(7, path, "refused", "chmod go-w")
			}
			assert.Equal(t, "generation", h.kernel.Generation, generation)
		})
	}
}

// TestNewerRecord: beside a record of a newer version an ADD changes nothing. It passes while its chain exists,
// also with an entry that is not stored, and one for a chain that does not exist fails.
func TestNewerRecord(t *testing.T) {
	h := newHost(t)
	h.add("podnet", nil)
	record := filepath.Join(h.dataDir, "record.json")
	assert.NoError(t, os.WriteFile(record, []byte(`{"schema":1000}`), 0o600))
	before, generation := *h.stored("podnet"), h.kernel.Generation
	newer := []string{record, "written by a newer version of ip-masq"}
	changed := h.conf("podnet", object{"masqLinkLocal": true})
	h.call(call{verb: "ADD", id: "changed", conf: changed}).want(0, newer...)
	h.call(call{verb: "CHECK", id: "changed", conf: changed}).want(0, newer...)
	h.call(call{verb: "STATUS", conf: changed}).want(0, newer...)
	other := h.conf("other", object{"masqChain": "OTHER"})
	h.call(call{verb: "ADD", id: "other", conf: other}).want(100, newer...)
	h.call(call{verb: "STATUS", conf: other}).want(50, newer...)
	h.call(call{verb: "DEL", id: "changed", conf: changed}).want(0, newer...)
	if now := *h.stored("podnet"); !reflect.DeepEqual(now, before) {
		t.Errorf("the document has changed: %+v", now)
	}
	assert.Equal(t, "generation", h.kernel.Generation, generation)
}

// TestGCOfARefusedDataDir: GC answers 5, also without an attachment to prune.
func TestGCOfARefusedDataDir(t *testing.T) {
	h := newHost(t)
	h.add("podnet", nil)
	assert.NoError(t, os.Chmod(h.dataDir, 0o777))
	h.call(call{verb: "GC", conf: h.conf("podnet", nil)}).want(5, h.dataDir, "refused", "chmod go-w")
}

// TestTryAgainLater: what ends by itself is code 11.
func TestTryAgainLater(t *testing.T) {
	h := newHost(t)
	h.call(call{verb: "ADD", conf: h.conf("podnet", object{"requireAgentConfig": true})}).
		want(11, "requireAgentConfig: no policy of the agent files is stored yet")
	lock := assert.Must(h.store().Lock(t.Context()))(t)
	h.call(call{verb: "ADD", conf: h.conf("podnet", nil)}).want(11, "another process holds it", "lsof")
	h.call(call{verb: "DEL", conf: h.conf("podnet", nil)}).want(0)
	assert.NoError(t, lock.Release())
	h.add("podnet", nil)
	agents := policy.Source{
		ID:     policy.SourceID{Kind: policy.AgentFiles},
		Policy: policy.SourcePolicy{Chain: chain},
	}
	lock = assert.Must(h.store().Lock(t.Context()))(t)
	assert.NoError(t, errors.Join(lock.Put(agents), lock.Release()))
	h.add("podnet", object{"requireAgentConfig": true})
}

// TestHotADD: an ADD that finds all verified asks the kernel for nothing but the generation.
func TestHotADD(t *testing.T) {
	h := newHost(t)
	h.add("podnet", nil)
	h.add("podnet", nil) // reads the rules, and writes the cache
	h.effects = nil
	h.call(call{verb: "ADD", id: "another", conf: h.conf("podnet", nil)}).want(0).clean()
	h.call(call{verb: "DEL", id: "another", conf: h.conf("podnet", nil)}).want(0).clean()
	assert.Equal(t, "effects", len(h.effects), 0)
	for name, keys := range map[string]object{
		"another policy": {"masqLinkLocal": true},
		"another subnet": {"prevResult": resultWith("10.2.0.2/16")},
	} {
		h.add("podnet", nil)
		h.effects = nil
		h.add("podnet", keys)
		if len(h.effects) == 0 {
			t.Errorf("%s: the rules were not read", name)
		}
	}
}

// TestDrift: CHECK reports the difference, and ADD repairs it.
func TestDrift(t *testing.T) {
	h := newHost(t)
	conf := h.conf("podnet", object{"backend": "nftables"})
	h.call(call{verb: "ADD", conf: conf}).want(0)
	ref := policy.ChainFamily{Chain: chain, Family: policy.IPv4}
	for name, tamper := range map[string]func(*policy.Chain){
		"no jump":  func(c *policy.Chain) { c.Jumps = nil },
		"no rules": func(c *policy.Chain) { c.Rules = nil },
		"an unrecognized rule": func(c *policy.Chain) {
			c.Rules = append([]policy.Rule{{Verdict: policy.Unrecognized}}, c.Rules...)
		},
	} {
		c := h.kernel.Chains[netfiltertest.NFTables][ref]
		tamper(&c)
		h.kernel.Chains[netfiltertest.NFTables][ref] = c
		h.kernel.Changed()
		before := h.snapshot()
		h.call(call{verb: "CHECK", conf: conf}).want(101, chain)
		h.call(call{verb: "STATUS", conf: conf}).want(0)
		assert.Equal(t, name+": state", h.snapshot(), before)
		h.call(call{verb: "ADD", conf: conf}).want(0)
		h.call(call{verb: "CHECK", conf: conf}).want(0).clean()
	}
}

// TestRulesThatCannotBeWritten: ADD answers 100 and STATUS 50 with what the kernel says, and DEL passes with
// a warning.
func TestRulesThatCannotBeWritten(t *testing.T) {
	h := newHost(t)
	refused := errors.New("simulated kernel: no such module")
	h.kernel.Accepts = func(policy.Ruleset, []policy.Guard) error { return refused }
	conf := h.conf("podnet", object{"backend": "nftables"})
	h.call(call{verb: "STATUS", conf: conf}).want(50, "ip-masq: ", refused.Error())
	h.call(call{verb: "ADD", conf: conf}).want(100, refused.Error())
	h.call(call{verb: "DEL", conf: conf}).want(0, refused.Error())
}

// TestPluginFile: with a plugin.toml the policy is that of the network's conflist. While the file is bad ADD,
// CHECK and STATUS fail, and DEL and GC pass.
func TestPluginFile(t *testing.T) {
	h := newHost(t)
	assert.NoError(t, os.Mkdir(h.confDir, 0o755))
	valid := fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\n", h.dataDir, h.confDir)
	assert.NoError(t, os.WriteFile(h.file, []byte(valid), 0o600))
	conflist := fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "podnet", "plugins": [{"type": "bridge"},
		{"type": "ip-masq", "masqChain": "OF-CONFLIST", "dataDir": %q}]}`, h.dataDir)
	file := filepath.Join(h.confDir, "10-podnet.conflist")
	assert.NoError(t, os.WriteFile(file, []byte(conflist), 0o600))

	conf := h.conf("podnet", object{"masqChain": "OF-STDIN"})
	h.call(call{verb: "ADD", conf: conf}).want(0, "differs in masqChain from the plugin entry", file)
	assert.Equal(t, "chains", h.chains(), []string{"OF-CONFLIST"})
	assert.Equal(t, "document's directory", h.stored("podnet").ConfDir, h.confDir)
	assert.Equal(t, "subnets", len(h.stored("podnet").PodSubnets), 0)
	pods, _, err := h.store().Pods()
	assert.NoError(t, err)
	assert.Equal(t, "addresses of the pod", len(pods[0].Addresses), 0)

	unknown := h.conf("blue", nil)
	h.call(call{verb: "ADD", conf: unknown}).want(7, `network "blue" has no policy`, h.file)
	h.call(call{verb: "STATUS", conf: unknown}).want(50, `network "blue" has no policy`)
	h.call(call{verb: "DEL", conf: unknown}).want(0)
	if h.stored("blue") != nil {
		t.Error("a network without a conflist has a document")
	}

	for name, c := range map[string]struct{ text, says string }{
		"an unknown key":   {valid + "allow_networks = [\"podnet\"]\n", "allow_networks: is not a known key"},
		"a misspelled key": {valid + "cni_confdir = \"/etc\"\n", "did you mean cni_conf_dir?"},
		"not TOML":         {"data_dir", h.file},
	} {
		h.run(name, func(t *testing.T) {
			assert.NoError(t, os.WriteFile(h.file, []byte(c.text), 0o600))
			generation := h.kernel.Generation
			for verb, code := range map[string]uint{"ADD": 7, "CHECK": 7, "STATUS": 50, "DEL": 0, "GC": 0} {
				h.call(call{verb: verb, conf: conf}).want(code, c.says)
			}
			assert.Equal(t, "generation", h.kernel.Generation, generation)
		})
	}
}

// TestUnreadableDocuments: ADD passes while its chain exists, and CHECK beside a document of a newer version.
func TestUnreadableDocuments(t *testing.T) {
	newer := store.Schema() + 1
	for name, c := range map[string]struct {
		text    string
		says    string
		isNewer bool
	}{
		"damaged": {"{", "read document", false},
		"newer":   {fmt.Sprintf(`{"schema":%d,"x":1}`, newer), fmt.Sprintf("schema %d", newer), true},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.add("podnet", nil)
			h.add("othernet", object{"masqChain": "OTHER"})
			other := h.store().DocumentPath(policy.SourceID{Kind: policy.Network, Name: "othernet"})
			assert.NoError(t, os.WriteFile(other, []byte(c.text), 0o600))
			h.call(call{verb: "ADD", id: "another", conf: h.conf("podnet", nil)}).want(0, c.says)
			h.call(call{verb: "CHECK", conf: h.conf("podnet", nil)}).want(0, c.says)
			h.call(call{verb: "DEL", id: "another", conf: h.conf("podnet", nil)}).want(0, c.says)
			h.call(call{verb: "STATUS", conf: h.conf("podnet", nil)}).want(0, c.says)
			assert.Equal(t, "chains", h.chains(), []string{chain, "OTHER"})
			changed := h.conf("othernet", object{"masqChain": "OTHER", "masqLinkLocal": true})
			h.call(call{verb: "ADD", conf: changed}).want(0)
			if text := string(assert.Must(os.ReadFile(other))(t)); (text == c.text) != c.isNewer {
				t.Errorf("the document is now %s", text)
			}
		})
	}
}
