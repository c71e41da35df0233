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
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

func TestKernels(t *testing.T) {
	for _, k := range kernels {
		t.Run(k.String(), func(t *testing.T) {
			last := "at most " + limit.String()
			if before, err := readReport(k); err == nil && len(before.Results) == len(programsOn(k.arch)) {
				last = fmt.Sprintf("about %d minutes, as the last time", before.Seconds/60+1)
			}
			t.Logf("this takes %s; see bin/kernels/%s.log", last, k)
			files := strings.TrimSpace(command(t, exec.Command(root+"/tools/debian-machine", k.suite, k.arch, k.pack)))
			r := run(t, k, files, disk(t, k.arch))
			r.write(t, k)
			must(t, os.WriteFile(docs+"README.md", []byte(table(t)), 0o644))
			for _, p := range programsOn(k.arch) {
				if s := r.Results[p.name()]; s == nil || s.Code != "0" || len(s.Failed) > 0 {
					t.Errorf("%s: %s; see bin/kernels/%s.log and .console", p.name(), s, k)
				}
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
		must(t, os.MkdirAll(filepath.Join(project, d), 0o755))
	}
	copied := exec.Command("bash", "-c", `set -o pipefail; git ls-files -z | tar --null -cT - | tar -xC "$0"`, project)
	copied.Dir = root
	command(t, copied)
	build("", "build", "-o", project+"/bin/ip-masq", "./plugin")
	build("", "build", "-o", project+"/bin/ip-masq-reconciler", "./reconciler")
	build("tools/cni", "build", "-o", project+"/bin/cni/", "tool", "./crioverbs")
	build("", "build", "-o", project+"/tests/", "./e2e/timelimit/scale")
	for _, p := range programsOn(arch) {
		args := []string{"test", "-c"}
		if p.main {
			args = []string{"build"}
		}
		build("", append(args, "-o", project+"/tests/"+p.file(), "./"+p.dir)...)
	}
	must(t, os.WriteFile(filepath.Join(dir, "job", "run"), []byte(script(arch)), 0o755))
	image := filepath.Join(dir, "job.ext4")
	command(t, exec.Command("/usr/sbin/mke2fs", "-q", "-t", "ext4", "-d", filepath.Join(dir, "job"), image, "2G"))
	return image
}

// script is the machine's first process. It writes to a port that the host reads.
func script(arch string) string {
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
for module in overlay veth bridge dummy nf_conntrack nf_tables nft_compat ip_tables ip6_tables iptable_nat ip6table_nat; do
	modprobe $module || echo "@warning no module $module"
done
ip link set lo up
echo 262144 >/proc/sys/net/netfilter/nf_conntrack_max # as of a node with 4 GB and more
echo "@fact kernel|$(uname -r)"
echo "@fact iptables|$(iptables --version | cut -d" " -f2)"
echo "@fact nft|$(nft --version | cut -d" " -f2)"
echo "@fact slowdown|$(/job/project/tests/scale 1s)"
`)
	for _, p := range programsOn(arch) {
		file := "/job/project/tests/" + p.file()
		fmt.Fprintf(&b, "cd /job/project/%s\necho \"@begin %s\"\n", p.dir, p.name())
		if p.main {
			fmt.Fprintf(&b, "%s\n", file)
		} else {
			fmt.Fprintf(&b, "rapid=$(%s -help 2>&1 | sed -n 's/^ *-rapid.shrinktime.*/-rapid.shrinktime=1s -rapid.checks=30/p')\n", file)
			fmt.Fprintf(&b, "%s -test.v -test.short -test.run '%s' -test.skip '%s' -test.timeout 20m $rapid\n", file, p.run, p.skip)
		}
		b.WriteString("echo \"@end $?\"\n")
	}
	b.WriteString("echo @done\n")
	return b.String()
}

// run starts the machine and reads what it says until it ends.
func run(t *testing.T, k kernel, files, job string) *report {
	t.Helper()
	must(t, os.MkdirAll(root+"/bin/kernels", 0o755))
	log := assert.Must(os.Create(fmt.Sprintf("%s/bin/kernels/%s.log", root, k)))(t)
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
	for serial, file := range map[string]string{"userland": files + "/userland.ext4", "job": job} {
		args = append(args, "-drive", fmt.Sprintf("file=%s,format=raw,if=none,id=%s,snapshot=on", file, serial),
			"-device", fmt.Sprintf("virtio-blk-%s,drive=%s,serial=%s", e.bus, serial, serial))
	}
	c := exec.CommandContext(ctx, e.args[0], args...)
	var complaints bytes.Buffer
	c.Stderr = &complaints
	out := assert.Must(c.StdoutPipe())(t)
	// qemu closes the port at the end of its standard input.
	if _, err := c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	r := &report{Commit: commit(t), Facts: map[string]string{}, Results: map[string]*result{}}
	began := time.Now()
	must(t, c.Start())
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
	r.Seconds = int(time.Since(began).Seconds())
	return r
}
