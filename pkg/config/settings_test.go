// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// wholeFile states every setting.
func wholeFile(t testing.TB) string {
	return `
resync_interval  = "90s"
backend          = "nftables"
cni_conf_dir     = "/etc/k3s/net.d"
cni_bin_dir      = "/srv/bin"
agent_config_dir = "/etc/config"
agent_dialect    = "v2"
data_dir         = "/srv//masq/"
health_listen    = ""
metrics_listen   = "[::1]:9820"
log_format       = "json"

[conflist]
manage     = true
network    = "podnet"
entry_file = "/srv/entry.json"

[agent]
cidrLimit = 100
` + strings.Join(policytest.Every(t, "", " = "), "\n")
}

func wholeSettings(t testing.TB) Settings {
	return Settings{
		ResyncInterval: 90 * time.Second, Backend: policy.NFTables,
		CNIConfDir: "/etc/k3s/net.d", CNIBinDir: "/srv/bin", AgentConfigDir: "/etc/config", AgentDialect: DialectV2,
		DataDir: "/srv/masq", MetricsListen: "[::1]:9820", LogFormat: "json",
		AgentStated: true, Agent: AgentPolicy{CIDRLimit: 100, Policy: policytest.Stating(t, strings.Join(policytest.Every(t, `"`, ":"), ","))},
		Conflist: ConflistSettings{Manage: true, Network: "podnet", EntryFile: "/srv/entry.json"},
	}
}

var ignoreOrigins = cmpopts.IgnoreFields(Settings{}, "Origins")

func reconcilerFile(t testing.TB, text string) string {
	t.Helper()
	return write(t, filepath.Join(t.TempDir(), "reconciler.toml"), text)
}

func TestSettings(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       func(*Settings)
	}{
		{"nothing", "# nothing yet\n", func(*Settings) {}},
		{"everything", wholeFile(t), func(s *Settings) { *s = wholeSettings(t) }},
		{"seconds", "resync_interval = 5", func(s *Settings) { s.ResyncInterval = 5 * time.Second }},
		{"seconds in quotes", "resync_interval = '5'", func(s *Settings) { s.ResyncInterval = 5 * time.Second }},
		{"an empty table", "[agent]", func(s *Settings) { s.AgentStated = true }},
		{"dotted keys", "agent.masqChain = 'A'\nconflist.manage = true\nagent.cidrLimit = 7", func(s *Settings) {
			s.AgentStated, s.Agent = true, AgentPolicy{Policy: policy.SourcePolicy{Chain: "A"}, CIDRLimit: 7}
			s.Conflist.Manage = true
		}},
		{"an inline table", "agent = {masqChain = 'A'}", func(s *Settings) { s.AgentStated, s.Agent = true, AgentPolicy{Policy: policy.SourcePolicy{Chain: "A"}} }},
		{"IPv6 that a file may enable", "[agent]\nmasqueradeCIDRs = ['fd00::/8']",
			func(s *Settings) {
				s.AgentStated, s.Agent = true, AgentPolicy{Policy: policy.SourcePolicy{MasqueradeCIDRs: policytest.Prefixes("fd00::/8")}}
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, want := DefaultSettings(), DefaultSettings()
			c.want(&want)
			assert.NoError(t, got.Read(reconcilerFile(t, c.text)))
			assert.Equal(t, "got", got, want, ignoreOrigins)
		})
	}
	// What a file does not state stays.
	got, want := wholeSettings(t), wholeSettings(t)
	want.Agent.Policy.Chain, want.LogFormat = "RED", "text"
	assert.NoError(t, got.Read(reconcilerFile(t, "log_format = 'text'\n[agent]\nmasqChain = 'RED'")))
	assert.Equal(t, "got", got, want, ignoreOrigins)
}

// Every mistake that the file can have. The settings stay as they were.
func TestSettingsMistakes(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		// Keys.
		{"bogus = 1", "FILE:1: bogus: is not a known key; remove it"},
		{"\nresync-interval = 1\n\"cni.dev/x\" = 1", "FILE:2: resync-interval: is not a known key; did you mean resync_interval?; FILE:3: cni.dev/x: is not a known key; remove it"},
		{"masqChain = 'A'\nnonMasqueradeCIDRs = 7", "FILE:1: masqChain: is a key of [agent]; write it below that line; FILE:2: nonMasqueradeCIDRs: is a key of [agent]; write it below that line"},
		{"[agent]\nmasqLinkLocal = true\nmasqchain = 'A'\nresyncInterval = 1",
			"FILE:3: agent.masqchain: is not a known key; did you mean masqChain?; FILE:4: agent.resyncInterval: is not a known key; remove it"},
		{"[conflist]\nmanage = true\nentry-file = ''", "FILE:3: conflist.entry-file: is not a known key; did you mean entry_file?"},
		{"[agents]\nmasqChain = 'A'", "FILE:1: agents: is not a known key; did you mean agent?"},
		{"[agent.deep]\nx = 1", "FILE:1: agent.deep: is not a known key; remove it"},
		{"agent = 1\n[[conflist]]", "FILE:1: agent: 1 is a number; write [agent] on a line of its own, and its keys below; " +
			"FILE:2: conflist: [{}] is a list; write [conflist] on a line of its own, and its keys below"},
		{"log_format = 'text'\nlog_format = 'text'", "FILE:2: not TOML: Key 'log_format' has already been defined."},
		{"a = [", "FILE:1: not TOML: unexpected EOF; expected value"},

		// Values.
		{"resync_interval = '0s'", "FILE:1: resync_interval: 0s is shorter than an interval can be; write 1s or more"},
		{"resync_interval = true", `FILE:1: resync_interval: true is a boolean; write a string such as "60s"`},
		{"backend = 'ipvs'", "FILE:1: backend: ipvs is not one of the choices; write auto, iptables or nftables"},
		{"cni_conf_dir = 'net.d'", "FILE:1: cni_conf_dir: net.d is relative; write an absolute path such as /etc/cni/net.d"},
		{"cni_bin_dir = ''", "FILE:1: cni_bin_dir: is empty; write an absolute path such as /opt/cni/bin, or leave the key out"},
		{"data_dir = '/srv/ip%masq'", `FILE:1: data_dir: /srv/ip%masq holds "%"; write a path of letters, digits and /._-+@, such as /var/lib/cni/ip-masq`},
		{"agent_dialect = 'v3'", "FILE:1: agent_dialect: v3 is not one of the choices; write v1 or v2"},
		{"log_format = ''", "FILE:1: log_format: is empty; write text or json, or leave the key out"},
		{"health_listen = '19820'", `FILE:1: health_listen: 19820 is not an address to listen on; write HOST:PORT such as 127.0.0.1:19820 or [::1]:19820, or "" for off`},
		{"health_listen = 19820", `FILE:1: health_listen: 19820 is a number; write a string such as "127.0.0.1:19820"`},
		{"health_listen = 'localhost'", `FILE:1: health_listen: localhost is not an address to listen on; write HOST:PORT such as 127.0.0.1:19820 or [::1]:19820, or "" for off`},
		{"metrics_listen = '::1'", `FILE:1: metrics_listen: ::1 is not an address to listen on; write HOST:PORT such as 127.0.0.1:19820 or [::1]:19820, or "" for off`},
		{"metrics_listen = ':http'", `FILE:1: metrics_listen: :http is not an address to listen on; write HOST:PORT such as 127.0.0.1:19820 or [::1]:19820, or "" for off`},
		{"[conflist]\nmanage = 'yes'\nnetwork = 'a b'", `FILE:2: conflist.manage: "yes" is a string; write true or false; ` +
			`FILE:3: conflist.network: "a b" is not the name of a network; write letters, digits, '_', '.' and '-', the first a letter or a digit`},

		// Policy.
		{"[ agent ]\nbogus = 1", "FILE:2: agent.bogus: is not a known key; remove it"},
		{"[agent]\nmasqChain = ''", "FILE:2: agent.masqChain: is empty; leave the key out for IP-MASQ-AGENT"},
		{"[agent]\nnonMasqueradeCIDRs = ['10.0.0.0/8', '10.0.1.24/24']",
			"FILE:2: agent.nonMasqueradeCIDRs[1]: 10.0.1.24/24 has host bits set; did you mean 10.0.1.0/24?"},
		{"[agent]\nnonMasqueradeCIDRs = ['10.0.0.0/8']\nmasqueradeCIDRs = ['10.0.0.0/8']",
			"FILE:3: agent.masqueradeCIDRs[0]: 10.0.0.0/8 is in nonMasqueradeCIDRs too; remove one of the two"},
		{"[agent]\ncidrLimit = 1\nmasqueradeCIDRs = []\nnonMasqueradeCIDRs = ['10.0.0.0/8', '172.16.0.0/12']",
			"FILE:2: agent.cidrLimit: nonMasqueradeCIDRs and masqueradeCIDRs have 2 entries together, more than the 1 allowed; remove some or raise cidrLimit"},
		{"log_format = 1\n[agent]\nmasqLinkLocal = 1\n[conflist]\nmanage = 1", `FILE:1: log_format: 1 is a number; write "text" or "json"; ` +
			"FILE:3: agent.masqLinkLocal: 1 is a number; write true or false; FILE:5: conflist.manage: 1 is a number; write true or false"},
	} {
		path := reconcilerFile(t, c.text+"\n")
		for _, before := range []Settings{DefaultSettings(), wholeSettings(t)} {
			s := before
			err := s.Read(path)
			if err == nil {
				t.Errorf("%q: no error", c.text)
				continue
			}
			policytest.WantError(t, err, path, c.want)
			assert.Equal(t, fmt.Sprintf("%q: an error changed the settings", c.text), s, before, ignoreOrigins)
		}
	}
}

func TestUnreadableSettings(t *testing.T) {
	dir := t.TempDir()
	s := DefaultSettings()
	missing := filepath.Join(dir, "missing")
	err := s.Read(missing)
	policytest.WantError(t, err, missing, "open FILE: no such file or directory")
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v is no fs.ErrNotExist", err)
	}
	policytest.WantError(t, s.Read(dir), dir, "read FILE: not a regular file")
	large := reconcilerFile(t, strings.Repeat("#", 64<<10+1))
	policytest.WantError(t, s.Read(large), large, "read FILE: larger than 64 KiB")
}

// Every key is a flag, and what a flag shows it also takes.
func TestFlags(t *testing.T) {
	whole := wholeSettings(t)
	texts, keys := map[string]string{}, map[string]bool{}
	for _, f := range whole.Flags() {
		if keys[f.Name] {
			t.Errorf("%s is there twice", f.Name)
		}
		keys[f.Name] = true
		if f.Usage == "" || len(f.Usage) > 120 || strings.ContainsAny(f.Usage, "\n`") || (f.Placeholder == "") != (f.Kind == Boolean) {
			t.Errorf("%s: usage %q", f.Name, f.Usage)
		}
		texts[f.Name] = f.Text()
	}
	got := DefaultSettings()
	for _, f := range got.Flags() {
		if strings.HasPrefix(f.Name, "agent.") && f.Text() != "" {
			t.Errorf("%s is %q and nobody stated it", f.Name, f.Text())
		}
		assert.NoError(t, got.Set(f.Name, texts[f.Name]))
	}
	for _, f := range got.Flags() {
		assert.Equal(t, f.Name, f.Text(), texts[f.Name])
	}
	assert.Equal(t, "got", got, whole)
	// The file has the same keys: the example of every key is read above.
	if want := strings.Count(wholeFile(t), "="); len(keys) != want {
		t.Errorf("%d keys, and the file has %d", len(keys), want)
	}
}

func TestSetField(t *testing.T) {
	agent := func(s policy.SourcePolicy) func(*Settings) {
		return func(to *Settings) { to.AgentStated, to.Agent = true, AgentPolicy{Policy: s} }
	}
	for _, c := range []struct {
		key, text, mistake string
		want               func(*Settings)
	}{
		{key: "resync_interval", text: "60", want: func(s *Settings) { s.ResyncInterval = time.Minute }},
		{key: "resync_interval", text: "2m", want: func(s *Settings) { s.ResyncInterval = 2 * time.Minute }},
		{key: "resync_interval", text: "often", mistake: "resync_interval: often is not an interval; write seconds, such as 60, or a number with its unit: 60s, 2m"},
		{key: "health_listen", text: "", want: func(s *Settings) { s.HealthListen = "" }},
		{key: "agent.nonMasqueradeCIDRs", text: "", want: agent(policy.SourcePolicy{NonMasqueradeCIDRs: policytest.Prefixes()})},
		{key: "agent.nonMasqueradeCIDRs", text: "10.0.0.0/8, fd00::/8", want: agent(policy.SourcePolicy{NonMasqueradeCIDRs: policytest.Prefixes("10.0.0.0/8", "fd00::/8")})},
		{key: "agent.nonMasqueradeCIDRs", text: "10.0.0.0/8,", mistake: "agent.nonMasqueradeCIDRs[1]: is empty; write a CIDR such as 10.0.0.0/8, or drop the item"},
		{key: "agent.nonMasqueradeCIDRs", text: "10.0.0.1/8,x", mistake: "agent.nonMasqueradeCIDRs[0]: 10.0.0.1/8 has host bits set; did you mean 10.0.0.0/8?; " +
			"agent.nonMasqueradeCIDRs[1]: x is not a CIDR; write address/length, such as 10.0.0.0/8 or fd00::/8"},
		{key: "agent.outputInterfaces", text: "eth0,+", mistake: "agent.outputInterfaces[1]: + would match every interface; leave outputInterfaces out instead"},
		{key: "agent.masqLinkLocal", text: "1", want: agent(policy.SourcePolicy{MasqLinkLocal: new(true)})},
		{key: "agent.masqLinkLocal", text: "maybe", mistake: "agent.masqLinkLocal: maybe is neither true nor false; write one of them"},
		{key: "agent.toPorts", text: "", want: agent(policy.SourcePolicy{ToPorts: &policy.Ports{}})},
		{key: "agent.cidrLimit", text: "007", want: func(s *Settings) { s.AgentStated, s.Agent = true, AgentPolicy{CIDRLimit: 7} }},
		{key: "agent.cidrLimit", text: "0", mistake: "agent.cidrLimit: 0 is not a whole number from 1 to 1000000; write one"},
		{key: "agent.cidrLimit", text: "1e2", mistake: "agent.cidrLimit: 1e2 is not a whole number; write one"},
		{key: "agent.masqChain", text: "", mistake: "agent.masqChain: is empty; leave the key out for IP-MASQ-AGENT"},
		{key: "agent.newKey", text: "1", mistake: "agent.newKey: is not a known key"},
		{key: "conflist.manage", text: "true", want: func(s *Settings) { s.Conflist.Manage = true }},
	} {
		got, want := DefaultSettings(), DefaultSettings()
		err := got.Set(c.key, c.text)
		if c.mistake != "" {
			policytest.WantError(t, err, "FILE", c.mistake)
		} else {
			c.want(&want)
			assert.NoError(t, err)
		}
		assert.Equal(t, fmt.Sprintf("%s=%s", c.key, c.text), got, want, ignoreOrigins)
	}
}

func TestAgentSource(t *testing.T) {
	for _, c := range []struct {
		text     string
		want     policy.SourcePolicy
		isSource bool
	}{
		{"", policy.SourcePolicy{}, false},
		{"resync_interval = '2m'\nbackend = 'nftables'", policy.SourcePolicy{}, false},
		{"agent_config_dir = '/etc/config'", policy.SourcePolicy{}, true},
		{"[agent]", policy.SourcePolicy{}, true},
		{"backend = 'nftables'\n[agent]\nmasqChain = 'A'", policy.SourcePolicy{Chain: "A"}, true},
		{"backend = 'nftables'\n[agent]\nbackend = 'auto'", policy.SourcePolicy{Backend: policy.Auto}, true},
		{"backend = 'auto'\n[agent]\nbackend = 'iptables'", policy.SourcePolicy{Backend: policy.IPTables}, true},
	} {
		s := DefaultSettings()
		assert.NoError(t, s.Read(reconcilerFile(t, c.text)))
		if diff := cmp.Diff(c.want, s.Agent.Policy); diff != "" || s.AgentSource() != c.isSource {
			t.Errorf("%q is a source: %t, want %t (-want +got):\n%s", c.text, s.AgentSource(), c.isSource, diff)
		}
	}
}

func FuzzSettings(f *testing.F) {
	for _, doc := range []string{
		"", wholeFile(f), "resync_interval = 60\nhealth_listen = '::1'\nagent.masqChain = ''\nconflist = {manage = 1}\n",
		"[agent]\nnonMasqueradeCIDRs = ['fd00::/8', 1, inf]\ncidrLimit = 0\n[agent.x]\ny = 1\n[[conflist]]\n",
		"agent = 1979-05-27\n\"agent.masqChain\" = 1\nmasqChain = 2\n[conflist]\n\"a\\u0000\" = nan\nnetwork = '/'\n",
	} {
		f.Add([]byte(doc), "agent.toPorts", "1-7")
		f.Add([]byte(doc), "agent.nonMasqueradeCIDRs", "10.0.0.0/8,\xff")
	}
	f.Fuzz(func(t *testing.T, doc []byte, key, text string) {
		if strings.Count(string(doc), ".")+strings.Count(string(doc), "{") > 200 {
			return // nesting takes the TOML decoder cubic time: a slow input is no finding
		}
		s := DefaultSettings()
		if err := s.parse("/etc/ip-masq/reconciler.toml", doc); err != nil {
			policytest.CheckMessage(t, err)
			assert.Equal(t, "an error changed the settings", s, DefaultSettings())
		}
		before := s
		if err := s.Set(key, text); err != nil {
			policytest.CheckMessage(t, err)
			assert.Equal(t, "an error changed the settings", s, before, ignoreOrigins)
		}
		if !filepath.IsAbs(s.DataDir) || !filepath.IsAbs(s.CNIConfDir) || s.ResyncInterval < time.Second {
			t.Errorf("accepts %+v", s)
		}
		// What a flag shows, it takes.
		var again Settings
		for i, field := range s.Flags() {
			if field.Text() == "" {
				continue
			}
			if err := again.Set(field.Name, field.Text()); err != nil {
				t.Errorf("%s shows %q, which is refused: %v", field.Name, field.Text(), err)
			} else if got := again.Flags()[i].Text(); got != field.Text() {
				t.Errorf("%s shows %q for %q", field.Name, got, field.Text())
			}
		}
	})
}

// What List returns makes the same settings elsewhere, with the origins.
func TestListOfSettings(t *testing.T) {
	path := reconcilerFile(t, wholeFile(t))
	s := DefaultSettings()
	assert.NoError(t, s.Read(path))
	assert.NoError(t, s.Set("log_format", "text"))
	got := DefaultSettings()
	assert.NoError(t, got.SetAll(s.List()))
	if !got.Equal(s) {
		t.Errorf("(-want +got):\n%s", cmp.Diff(s, got, comparePrefixes))
	}
	assert.Equal(t, "settings", got.List(), s.List())
	origins := map[string]string{}
	for _, x := range got.List() {
		origins[x.Key] = x.Origin
	}
	for key, want := range map[string]string{
		"resync_interval": path + ":2", "agent.cidrLimit": path + ":19", "log_format": FlagOrigin, "conflist.network": path + ":15",
	} {
		assert.Equal(t, fmt.Sprintf("%s: origin", key), origins[key], want)
	}
	defaults := DefaultSettings()
	for _, x := range defaults.List() {
		if x.Origin != DefaultOrigin {
			t.Errorf("%s: origin %q of a default", x.Key, x.Origin)
		}
	}
}
