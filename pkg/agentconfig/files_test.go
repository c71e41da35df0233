// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var comparePrefixes = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

func write(t testing.TB, path, text string) string {
	t.Helper()
	assert.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// agentDirOf makes a directory with the files, which are NAME, text, NAME, text…
func agentDirOf(t testing.TB, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	for i := 0; i+1 < len(files); i += 2 {
		write(t, filepath.Join(dir, files[i]), files[i+1])
	}
	return dir
}

// warningsOf writes what was warned of, with DIR for the directory.
func warningsOf(t testing.TB, a Files) string {
	t.Helper()
	var lines []string
	for _, w := range append(slices.Clone(a.UnknownKeys), a.Warnings...) {
		policytest.CheckMessage(t, errors.New(w))
		lines = append(lines, strings.ReplaceAll(w, a.Dir, "DIR"))
	}
	return strings.Join(lines, "\n")
}

// manySources is a document of so many prefixes.
func manySources(n int) string {
	text := "sourceCIDRs:\n"
	for i := range n {
		text += fmt.Sprintf("- 10.%d.%d.0/24\n", i>>8, i&255)
	}
	return text
}

// source is the agent files with FILE, SourcePolicy, FILE, SourcePolicy…
func source(chain string, files ...any) policy.Source {
	s := policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}, Policy: policy.SourcePolicy{Chain: chain}}
	for i := 0; i < len(files); i += 2 {
		stated := files[i+1].(policy.SourcePolicy)
		stated.Chain = chain
		s.Files = append(s.Files, policy.FilePolicy{File: files[i].(string), Policy: stated})
	}
	return s
}

// TestAgentDocument writes what each file states, whatever way it is written in, or every mistake that it
// has, into testdata/documents.txt.
func TestAgentDocument(t *testing.T) {
	var got strings.Builder
	for _, tt := range []struct {
		dialect config.Dialect
		texts   []string
	}{{config.DialectV2, []string{"", "masqLinkLocal: yes", "nonMasqueradeCIDRs: [10.0.0.0/8]"}}, {config.DialectV1, []string{
		"", "# nothing yet\n", "---\nnull\n", "nonMasqueradeCIDRs: []",
		"nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n  - 10.0.0.0/8\n  - '192.168.0.0/16'\nmasqLinkLocal: false\nresyncInterval: 60s\n",
		"{\n\t\"nonMasqueradeCIDRs\":\t[\"10.0.0.0/8\"],\n\t\"masqLinkLocalIPv6\": true}\n",
		"\xef\xbb\xbf---\r\n{nonmasqueradecidrs: [10.0.0.0/8],\r\n TOPORTS: 1-7}\r\n",
		"NonMasqueradeCIDRs: []\nMASQLINKLOCAL: true\nresyncinterval: 5\nmaſqChain: BLUE\n",
		strings.Join(policytest.Every(t, "", ": "), "\n") + "\ncidrLimit: 2\nresyncInterval: '7'\n",
		"sourceCIDRs: [10.1.0.0/16]\noutputInterfaces: [eth0, wg+]\ntoPorts: 1024-29999\nmasqChain: RED\nguard: drop\n",
		"guard: off\n", // which is a boolean of YAML
		"nonMasqueradeCidr: []\nbogus:\n  a: [1]\n\"cni.dev/x\": 1\n\"a\\nb\": 1\n",
		"a: 1\nb: 1\nc: 1\nd: 1\ne: 1\nf: 1\ng: 1\nh: 1\ni: 1\nj: 1\n",
		"masqueradeCIDRs:\nmasqChain: ~\nrandomFully: null\ncidrLimit:\nresyncInterval:\n",
		"masqLinkLocal: true\n---\n...\n",
		"masqLinkLocal: true # no %TAG\n",

		// Mistakes in documents.
		"nonMasqueradeCIDRs: [", "a: b: c", "a: \"\xff\"", "[10.0.0.0/8]", "# text\n10.0.0.0/8", "a: &x [1]\nb: *x", "a: 1\nb: *x",
		"a: 1\n---\nb: 1", "a: 1\n---\n---\nb: 1", "a: 1\n---\nb: [1", "%TAG !a! tag:x\n---\na: 1\n", "a: 1\n...\n%TAG !a! tag:x\n---\n",
		"\xfe\xff\x00a\x00:\x00 \x001", "a: " + strings.Repeat("[", 20_000), "a: .inf",

		// Keys.
		"masqLinkLocal: true\nmasqLinkLocal: true", "masqLinkLocal: true\nx: 1\nMasqlinklocal: true", "{\"masqLinkLocal\": true,\n\"masqLinkLocal\": null}",

		// Lists.
		"nonMasqueradeCIDRs: [null]", "nonMasqueradeCIDRs:\n- 10.0.0.0/8\n-\n- 10.0.1.24/24\n- 7", "{\"masqueradeCIDRs\":\n[\"10.0.0.0/8\",\n\"\"]}",
		"a: 1\nnonMasqueradeCIDRs:\n- 10.0.0.0/8\n- 10.0.0.0/8\n- fd00::/8", "nonMasqueradeCIDRs: [10.0.0.0/8]\nmasqueradeCIDRs: [10.0.0.0/8]",

		// Scalars.
		"bypassMark: 0x6000", "guard: on", "cidrLimit: 1\nnonMasqueradeCIDRs: [10.0.0.0/8]\nmasqueradeCIDRs: [10.1.0.0/16]",
		"resyncInterval: 0", "resyncInterval: 999ms", "resyncInterval: 1.5", "resyncInterval: [60]",
	}}} {
		for _, text := range tt.texts {
			dir := agentDirOf(t, "ip-masq-agent", text)
			read, err := Read(dir, tt.dialect, config.AgentPolicy{})
			assert.Equal(t, text+": names", read.Names, []string{"ip-masq-agent"})
			fmt.Fprintf(&got, "%s: %s\n", tt.dialect, policy.Quote(text))
			if err != nil {
				policytest.CheckMessage(t, err)
				fmt.Fprintf(&got, "%s\n\n", strings.ReplaceAll(err.Error(), dir, "DIR"))
				assert.Equal(t, text+": contributes in spite of its mistakes", read.Source, policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}})
				continue
			}
			stated := strings.ReplaceAll(string(assert.Must(json.Marshal(read.Source))(t)), dir, "DIR")
			fmt.Fprintf(&got, "every %s: %s\n%s\n", read.ResyncInterval, stated, strings.TrimPrefix(warningsOf(t, read)+"\n", "\n"))
		}
	}
	golden.Check(t, "testdata/documents.txt", got.String())
}

func TestAgentFilesUnited(t *testing.T) {
	dir := agentDirOf(t,
		"ip-masq-a", "nonMasqueradeCIDRs: [10.0.0.0/8, 10.1.0.0/16, 10.1.0.0/16, 10.2.0.0/16]\nmasqLinkLocal: false\nresyncInterval: 5m\nbackend: auto\nrandomFully: false\ntoPorts: '9-12,1-7'\n",
		"ip-masq-b", "nonMasqueradeCIDRs: [172.16.0.0/12, 10.1.0.0/16, fd00::/8]\nmasqLinkLocal: true\nresyncInterval: 30\nbackend: nftables\ntoPorts: '1-7,9-12'\nmasqChain: BLUE\n",
		"ip-masq-c", "masqLinkLocal: false\nenableIPv6: true\nnonMasqueradeSourceCIDRs: [10.9.0.0/16]\ncidrLimit: 1\n",
		"ip-masq-c~", "masqLinkLocal: {", "config", "masqLinkLocal: {", ".ip-masq", "{")
	own := config.AgentPolicy{Policy: policy.SourcePolicy{NonMasqueradeCIDRs: policytest.Prefixes("10.2.0.0/16", "10.3.0.0/16"), Chain: "BLUE", RandomFully: new(false)}}
	got := assert.Must(Read(dir, config.DialectV1, own))(t)
	path := func(name string) string { return filepath.Join(dir, name) }
	want := Files{
		Dir: dir, Names: []string{"ip-masq-a", "ip-masq-b", "ip-masq-c"}, ResyncInterval: 30 * time.Second,
		Source: source("BLUE",
			config.OwnPolicy, own.Policy,
			path("ip-masq-a"), policy.SourcePolicy{
				NonMasqueradeCIDRs: policytest.Prefixes("10.0.0.0/8", "10.1.0.0/16", "10.2.0.0/16"), MasqLinkLocal: new(false),
				Backend: policy.Auto, RandomFully: new(false), ToPorts: policytest.Ports(t, "9-12,1-7"),
			},
			path("ip-masq-b"), policy.SourcePolicy{
				NonMasqueradeCIDRs: policytest.Prefixes("172.16.0.0/12", "10.1.0.0/16", "fd00::/8"), MasqLinkLocal: new(true),
				Backend: policy.NFTables, ToPorts: policytest.Ports(t, "1-7,9-12"),
			},
			path("ip-masq-c"), policy.SourcePolicy{
				NonMasqueradeSourceCIDRs: policytest.Prefixes("10.9.0.0/16"), MasqLinkLocal: new(false), EnableIPv6: new(true),
			}),
	}
	assert.Equal(t, "got", got, want)

	// Merged they are one policy, whose values have the files as their origins.
	p := policy.Merge([]policy.Source{got.Source})[0]
	var origins []string
	for _, e := range p.Destinations {
		text := e.Prefix.String()
		for _, o := range e.Origins {
			text += fmt.Sprintf(" %s[%d]", filepath.Base(o.File), o.Index)
		}
		origins = append(origins, text)
	}
	wantOrigins := []string{
		"fe80::/10 .[-1]", "10.2.0.0/16 " + config.OwnPolicy + "[0] ip-masq-a[2]", "10.3.0.0/16 " + config.OwnPolicy + "[1]", "10.0.0.0/8 ip-masq-a[0]",
		"10.1.0.0/16 ip-masq-a[1] ip-masq-b[1]", "172.16.0.0/12 ip-masq-b[0]", "fd00::/8 ip-masq-b[2]",
	}
	assert.Equal(t, "origins", origins, wantOrigins)
	if p.Backend.Value != policy.NFTables || p.RandomFully.Value || p.ToPorts.Value.String() != "9-12,1-7" || !p.EnableIPv6.Value || len(p.ExemptSources) != 1 || len(p.Conflicts) > 0 {
		t.Errorf("merged: %+v", p)
	}
}

func TestAgentFilesThatConflict(t *testing.T) {
	for _, c := range []struct {
		name, a, b string
		own        config.AgentPolicy
		want       string
	}{
		{name: "a scalar", a: "x: 1\nenableIPv6: true", b: "enableIPv6: false",
			want: "DIR/ip-masq-b:1: enableIPv6: false conflicts with true in DIR/ip-masq-a; write the same in both, or leave it out of one"},
		{name: "chain, ports, words and a mask", a: "toPorts: ''\nmasqChain: A\nguard: drop\nbypassMark: '0x4000'",
			b: "bypassMark: '0'\nguard: off\ntoPorts: 1-7\nmasqChain: B",
			want: "DIR/ip-masq-b:4: masqChain: B conflicts with A in DIR/ip-masq-a; write the same in both, or leave it out of one; " +
				"DIR/ip-masq-b:3: toPorts: 1-7 conflicts with empty in DIR/ip-masq-a; write the same in both, or leave it out of one; " +
				"DIR/ip-masq-b:2: guard: off conflicts with drop in DIR/ip-masq-a; write the same in both, or leave it out of one; " +
				"DIR/ip-masq-b:1: bypassMark: 0 conflicts with 0x4000 in DIR/ip-masq-a; write the same in both, or leave it out of one"},
		{name: "our own policy", a: "randomFully: true", b: "backend: nftables",
			own: config.AgentPolicy{Policy: policy.SourcePolicy{RandomFully: new(false), Backend: policy.IPTables}},
			want: "DIR/ip-masq-a:1: randomFully: true conflicts with false in [agent] of the reconciler's settings; write the same in both, or leave it out of one; " +
				"DIR/ip-masq-b:1: backend: nftables conflicts with iptables in [agent] of the reconciler's settings; write the same in both, or leave it out of one"},
		{name: "a prefix", a: "masqueradeCIDRs:\n- 10.9.0.0/16\n- 10.1.0.0/16", b: "nonMasqueradeCIDRs: [10.0.0.0/8, 10.0.0.0/8, 10.1.0.0/16]",
			want: "DIR/ip-masq-b:1: nonMasqueradeCIDRs[2]: 10.1.0.0/16 conflicts with masqueradeCIDRs[1] in DIR/ip-masq-a; remove one of the two"},
		{name: "a prefix of our own policy", a: "masqueradeCIDRs: [10.0.0.0/8]",
			own:  config.AgentPolicy{Policy: policy.SourcePolicy{NonMasqueradeCIDRs: policytest.Prefixes("10.0.0.0/8")}},
			want: "DIR/ip-masq-a:1: masqueradeCIDRs[0]: 10.0.0.0/8 conflicts with nonMasqueradeCIDRs[0] in [agent] of the reconciler's settings; remove one of the two"},
		{name: "a prefix that one file has in both", a: "nonMasqueradeCIDRs: [10.0.0.0/8]", b: "nonMasqueradeCIDRs: [10.0.0.0/8]\nmasqueradeCIDRs: [10.0.0.0/8]",
			want: "DIR/ip-masq-b:2: masqueradeCIDRs[0]: 10.0.0.0/8 is in nonMasqueradeCIDRs too; remove one of the two"},
		{name: "IPv6 that nobody enables", a: "nonMasqueradeCIDRs: [fd00::/8]", own: config.AgentPolicy{Policy: policy.SourcePolicy{MasqueradeCIDRs: policytest.Prefixes("fd01::/16")}},
			want: `[agent] of the reconciler's settings: masqueradeCIDRs[0]: fd01::/16 is an IPv6 prefix, but IPv6 is not enabled; set enableIPv6 to true, or remove it; ` +
				`DIR/ip-masq-a:1: nonMasqueradeCIDRs[0]: fd00::/8 is an IPv6 prefix, but IPv6 is not enabled; set enableIPv6 to true, or remove it`},
		{name: "IPv6 that a bad file may enable", a: "nonMasqueradeCIDRs: [fd00::/8]", b: "enableIPv6: 1",
			want: "DIR/ip-masq-b:1: enableIPv6: 1 is a number; write true or false"},
		{name: "IPv6 beside a file that cannot be read", a: "nonMasqueradeCIDRs: [fd00::/8]", b: "{",
			want: "DIR/ip-masq-b:1: not YAML: did not find expected node content"},
		{name: "bounds of all together", a: manySources(241), b: "outputInterfaces: [a, b, c, d, e, f, g, h, i, j, k, l, m, nn, o, p, q]",
			want: "the agent files together: sourceCIDRs: has 241 entries, which with the 17 of outputInterfaces make 4097 pairs, more than the 4096 possible; remove some"},
		{name: "pods of all together", a: strings.Replace(manySources(4000), "sourceCIDRs", "podCIDRs", 1),
			b:    strings.NewReplacer("sourceCIDRs", "podCIDRs", "- 10.", "- 11.").Replace(manySources(97)),
			want: "the agent files together: podCIDRs: has 4097 entries, more than the 4096 possible; remove some, or write wider prefixes"},
		{name: "limits of each document", a: "nonMasqueradeCIDRs: [10.0.0.0/16, 10.1.0.0/16]", b: "cidrLimit: 1\nmasqueradeCIDRs: [10.2.0.0/16, 10.3.0.0/16]",
			own: config.AgentPolicy{CIDRLimit: 1, Policy: policy.SourcePolicy{NonMasqueradeCIDRs: policytest.Prefixes("10.4.0.0/16", "10.5.0.0/16")}},
			want: "[agent] of the reconciler's settings: cidrLimit: nonMasqueradeCIDRs and masqueradeCIDRs have 2 entries together, more than the 1 allowed; remove some or raise cidrLimit; " +
				"DIR/ip-masq-b:1: cidrLimit: nonMasqueradeCIDRs and masqueradeCIDRs have 2 entries together, more than the 1 allowed; remove some or raise cidrLimit"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := agentDirOf(t, "ip-masq-a", c.a, "ip-masq-b", c.b)
			for range 3 { // the words are always the same
				got, err := Read(dir, config.DialectV1, c.own)
				policytest.CheckMessage(t, err)
				assert.Equal(t, "message", strings.ReplaceAll(err.Error(), dir, "DIR"), c.want)
				assert.Equal(t, "names", got.Names, []string{"ip-masq-a", "ip-masq-b"})
			}
		})
	}
}

func TestOwnPolicyAlone(t *testing.T) {
	file := write(t, filepath.Join(t.TempDir(), "file"), "")
	missing := filepath.Join(t.TempDir(), "missing")
	dangling := filepath.Join(t.TempDir(), "link")
	assert.NoError(t, os.Symlink(missing, dangling))
	own := config.AgentPolicy{Policy: policy.SourcePolicy{Chain: "BLUE", MasqueradeCIDRs: policytest.Prefixes("10.0.0.0/8")}}
	for _, dir := range []string{"", missing, dangling, agentDirOf(t)} {
		for _, dialect := range []config.Dialect{config.DialectV1, config.DialectV2} {
			got := assert.Must(Read(dir, dialect, own))(t)
			want := Files{Dir: dir, Missing: dir == missing || dir == dangling, Source: source("BLUE", config.OwnPolicy, own.Policy)}
			assert.Equal(t, dir, got, want)
		}
	}
	_, err := Read(file, config.DialectV1, own)
	policytest.WantError(t, err, file, "read the agent files in FILE: not a directory; name the directory that holds the files")

	dir := agentDirOf(t, "config.yaml", "masqLinkLocal: true", "ip-masq-agent~", "")
	got := assert.Must(Read(dir, config.DialectV2, config.AgentPolicy{}))(t)
	assert.Equal(t, "warnings", warningsOf(t, got), "DIR has files, but the name of none begins with ip-masq; rename the agent files")
	assert.Equal(t, "source", got.Source, source(policy.DefaultChain))
}

// What is proposed for an unknown key means the same, and the mistake of a whole ConfigMap is said once.
func TestUnknownKeysOfAgentFiles(t *testing.T) {
	for text, want := range map[string]string{
		"NonMasqueradeCIDRs: [10.0.0.0/8]\nNonMasqueradeSrcCIDRs: [10.9.0.0/16]": "2: NonMasqueradeSrcCIDRs: is not a known key and is ignored; " +
			"did you mean nonMasqueradeSourceCIDRs?",
		"forceMasqueradeCIDRs: [10.9.0.0/16]": "1: forceMasqueradeCIDRs: is not a known key and is ignored; did you mean masqueradeCIDRs?",
		"masqRandomFully: true":               "1: masqRandomFully: is not a known key and is ignored; did you mean randomFully?",
		"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: ip-masq-agent}\ndata:\n  config: |\n    masqLinkLocal: true\n": "1: apiVersion: is not a known key and is ignored; " +
			"this is a whole ConfigMap; write only the text of the file in it, without data and the name of the file",
		"data:\n  config: |\n    nonMasqueradeCIDRs: [10.0.0.0/8]\n": "1: data: is not a known key and is ignored; this is a whole ConfigMap; " +
			"write only the text of the file in it, without data and the name of the file",
		"data:\n  config:\n    nonMasqueradeCIDRs: [10.0.0.0/8]\n": "1: data: is not a known key and is ignored; this is a whole ConfigMap; " +
			"write only the text of the file in it, without data and the name of the file",
		"ip-masq-agent: |\n  nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n  resyncInterval: 60s\n": "1: ip-masq-agent: is not a known key and is ignored; " +
			"write the keys inside it one level up, without ip-masq-agent",
		"apiVersion: v1\nkind: List\nitems:\n- kind: ConfigMap\n  data:\n    config: |\n      masqLinkLocal: true\n": "1: apiVersion: is not a known key and is ignored; " +
			"this is a list of objects; write only the text of the file in its ConfigMap, without data and the name of the file",
		"config:\n  masqLinkLocal: true\n":   "1: config: is not a known key and is ignored; write the keys inside it one level up, without config",
		"config: |\n  masqlinklocal: true\n": "1: config: is not a known key and is ignored; write the keys inside it one level up, without config",
	} {
		dir := agentDirOf(t, "ip-masq-agent", text)
		a := assert.Must(Read(dir, config.DialectV1, config.AgentPolicy{}))(t)
		assert.Equal(t, "unknown keys", a.UnknownKeys, []string{filepath.Join(dir, "ip-masq-agent") + ":" + want})
	}
}
