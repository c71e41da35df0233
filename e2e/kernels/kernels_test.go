// SPDX-License-Identifier: Apache-2.0

//go:build e2e_kernels

package kernels

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

const root = "../.."

func TestKernels(t *testing.T) {
	for _, k := range kernels {
		t.Run(k.String(), func(t *testing.T) {
			t.Logf("up to %s on one core", limit)
			files := strings.TrimSpace(command(t, exec.Command(root+"/tools/debian-machine", k.suite, k.arch, k.pack)))
			report := run(t, k, files, disk(t, k.arch))
			if len(report.results) == len(programs) {
				report.write(t, k)
			}
			for _, r := range report.results {
				if r.code != "0" || len(r.failed) > 0 {
					t.Errorf("%s: exit code %s, failed: %s; see bin/kernels/%s.log", r.name, r.code, strings.Join(r.failed, ", "), k)
				}
			}
			if len(report.results) < len(programs) {
				t.Errorf("the machine ended after %d of %d programs; see bin/kernels/%s.log and .console", len(report.results), len(programs), k)
			}
		})
	}
}

// disk makes a file system of the project's files, its binaries, its tests and the script that runs
// them.
func disk(t *testing.T, arch string) string {
	t.Helper()
	dir := t.TempDir()
	project := filepath.Join(dir, "job", "project")
	build := func(in string, args ...string) {
		c := exec.Command("go", args...)
		c.Dir, c.Env = filepath.Join(root, in), append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
		command(t, c)
	}
	for _, d := range []string{"bin/cni", "tests"} {
		if err := os.MkdirAll(filepath.Join(project, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	copied := exec.Command("bash", "-c", `set -o pipefail; git ls-files -z | tar --null -cT - | tar -xC "$0"`, project)
	copied.Dir = root
	command(t, copied)
	build("", "build", "-o", project+"/bin/ip-masq", "./plugin")
	build("", "build", "-o", project+"/bin/ip-masq-reconciler", "./reconciler")
	build("tools/cni", "build", "-o", project+"/bin/cni/", "tool", "./crioverbs")
	build("", "build", "-o", project+"/tests/", "./e2e/timelimit/scale")
	for _, p := range programs {
		build("", "test", "-c", "-o", project+"/tests/", "./"+p.dir)
	}
	if err := os.WriteFile(filepath.Join(dir, "job", "run"), []byte(script()), 0o755); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(dir, "job.ext4")
	command(t, exec.Command("/usr/sbin/mke2fs", "-q", "-t", "ext4", "-L", "job", "-d", filepath.Join(dir, "job"), image, "2G"))
	return image
}

// script is the machine's first process. It writes to a port that the host reads.
func script() string {
	var b strings.Builder
	b.WriteString(`#!/bin/bash
exec </dev/null >$(echo /dev/vport*) 2>&1 # the only one: bash would make a file of another name
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
export IPMASQ_BIN_DIR=/job/project/bin IPMASQ_MOST_SLOWDOWN=1000
trap 'echo b >/proc/sysrq-trigger' EXIT
mkdir -p /opt /root /var/lib
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
for directory in /dev/shm /run /tmp; do mount -t tmpfs tmpfs $directory; done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for module in overlay veth bridge dummy nf_tables nft_compat ip_tables ip6_tables iptable_nat ip6table_nat; do
	modprobe $module || echo "@warning no module $module"
done
ip link set lo up
echo "@fact Kernel|$(uname -r)"
echo "@fact iptables|$(iptables --version)"
echo "@fact nft|$(nft --version)"
echo "@fact Slower than an idle machine by|$(/job/project/tests/scale 1s)"
`)
	for _, p := range programs {
		test := filepath.Base(p.dir)
		fmt.Fprintf(&b, "cd /job/project/%s\necho '@begin %s'\n", p.dir, p.dir)
		fmt.Fprintf(&b, "/job/project/tests/%s.test -test.v -test.run '%s' -test.timeout $(/job/project/tests/scale %s) -rapid.shrinktime=1s\n", test, p.run, p.limit)
		fmt.Fprintf(&b, "echo \"@end %s $?\"\n", p.dir)
	}
	b.WriteString("echo @done\n")
	return b.String()
}

// run starts the machine and reads what it says until it ends.
func run(t *testing.T, k kernel, files, job string) *report {
	t.Helper()
	if err := os.MkdirAll(root+"/bin/kernels", 0o755); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(fmt.Sprintf("%s/bin/kernels/%s.log", root, k))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	e := emulators[k.arch]
	args := slices.Concat(e.args[1:], []string{
		"-accel", "tcg,tb-size=1024", "-smp", "1", "-m", "3G", "-nic", "none", "-display", "none", "-no-reboot", "-monitor", "none",
		"-kernel", files + "/vmlinuz", "-initrd", files + "/initrd",
		"-append", "console=" + e.console + " mitigations=off nokaslr init_on_alloc=0 apparmor=0 audit=0 tsc=reliable random.trust_cpu=on panic=1",
		"-device", "virtio-rng-" + e.bus, "-serial", fmt.Sprintf("file:%s/bin/kernels/%s.console", root, k),
		"-device", "virtio-serial-" + e.bus, "-chardev", "stdio,id=out,signal=off", "-device", "virtserialport,chardev=out",
	})
	for i, file := range []string{files + "/userland.ext4", job} {
		args = append(args, "-drive", fmt.Sprintf("file=%s,format=raw,if=none,id=disk%d,snapshot=on", file, i),
			"-device", fmt.Sprintf("virtio-blk-%s,drive=disk%d", e.bus, i))
	}
	c := exec.CommandContext(ctx, e.args[0], args...)
	var complaints bytes.Buffer
	c.Stderr = &complaints
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	// qemu closes the port at the end of its standard input.
	if _, err := c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	r := &report{}
	began := time.Now()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		fmt.Fprintln(log, lines.Text())
		r.line(t, lines.Text(), time.Since(began))
	}
	if err := c.Wait(); err != nil || lines.Err() != nil {
		t.Errorf("qemu: %v, %v %s", err, lines.Err(), complaints.String())
	}
	t.Logf("qemu ended after %s: %s", time.Since(began).Round(time.Second), complaints.String())
	r.took = time.Since(began)
	return r
}

// report is what a machine said.
type report struct {
	facts   [][2]string
	results []*result
	took    time.Duration
	current *result
	began   time.Duration
}

type result struct {
	name, code string
	passed     int
	failed     []string
	took       time.Duration
}

var ended = regexp.MustCompile(`^--- (PASS|FAIL): (\S+)`)

func (r *report) line(t *testing.T, line string, at time.Duration) {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "@fact":
		name, value, _ := strings.Cut(rest, "|")
		if len(r.facts) == 0 {
			r.facts = append(r.facts, [2]string{"Seconds to boot", fmt.Sprintf("%.0f", at.Seconds())})
		}
		r.facts = append(r.facts, [2]string{name, value})
		t.Logf("%s: %s", name, value)
	case "@begin":
		r.current, r.began = &result{name: rest}, at
	case "@end":
		r.current.name, r.current.code, _ = strings.Cut(rest, " ")
		r.current.took = at - r.began
		r.results = append(r.results, r.current)
		t.Logf("%s: %d passed, %d failed, %s", r.current.name, r.current.passed, len(r.current.failed), r.current.took.Round(time.Second))
	case "---":
		if m := ended.FindStringSubmatch(line); m != nil && r.current != nil {
			if m[1] == "PASS" {
				r.current.passed++
			} else {
				r.current.failed = append(r.current.failed, m[2])
			}
		}
	}
}

// write writes the table of results.
func (r *report) write(t *testing.T, k kernel) {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "# %s, %s\n\nWritten by `make e2e-kernels KERNELS=%s`.\n\n", k.suite, k.arch, k)
	for _, f := range r.facts {
		fmt.Fprintf(&b, "- %s: %s\n", f[0], f[1])
	}
	fmt.Fprintf(&b, "- Seconds in all: %.0f\n\n| tests of | passed | failed | seconds |\n|---|---|---|---|\n", r.took.Seconds())
	for _, s := range r.results {
		failed := strings.Join(s.failed, ", ")
		if failed == "" && s.code != "0" {
			failed = "exit code " + s.code
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %.0f |\n", s.name, s.passed, failed, s.took.Seconds())
	}
	if err := os.MkdirAll(root+"/docs/kernels", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(fmt.Sprintf("%s/docs/kernels/%s.md", root, k), []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// command runs a command and returns what it wrote to standard output.
func command(t *testing.T, c *exec.Cmd) string {
	t.Helper()
	var errors bytes.Buffer
	c.Stderr = &errors
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", c, err, errors.String())
	}
	return string(out)
}
